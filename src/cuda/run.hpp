// One call on a GPU: its status cleared, its kernels launched, and where asked for the status read.
#pragma once

#include "core/problem.hpp"
#include "plan/plan.hpp"

namespace narrows::cuda {

/// Puts the call on its stream and returns. check: waits for it and throws Error (invalid_value) if a sequence broke a rule; the
/// stream must not be being captured then.
void run(const Call& call, const Plan& plan, bool check);

}  // namespace narrows::cuda
