// A backward call on a GPU.
#pragma once

#include "plan/plan.hpp"
#include "shared/backward_args.h"

namespace narrows::cuda {

/// Enqueues the call on its stream. Its device is current. Throws Error before anything is written.
void run_backward(const Problem& problem, const Plan& plan, const Buffers& buffers);

/// Compiles and loads what run_backward will launch.
void prepare_backward(const Problem& problem, const Plan& plan);

/// What every kernel is given. scratch: of plan.workspace_bytes(), aligned. Reads no device memory.
BackwardArgs backward_args(const Problem& problem, const Plan& plan, const Buffers& buffers, std::byte* scratch);

}  // namespace narrows::cuda
