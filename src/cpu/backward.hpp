// The blocked backward pass on the CPU, by recomputation.
#pragma once

#include "core/problem.hpp"
#include "plan/plan.hpp"

namespace narrows::cpu {

/// Writes the gradients that the problem wants. Bits do not depend on plan.threads.
void run_backward(const Problem& problem, const Plan& plan, const Buffers& buffers);

}  // namespace narrows::cpu
