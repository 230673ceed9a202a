// A forward call on a GPU.
#pragma once

#include "plan/plan.hpp"
#include "shared/forward_args.h"

namespace narrows::cuda {

/// Enqueues the call on its stream. Its device is current. Throws Error before anything is written.
void run_forward(const Problem& problem, const Plan& plan, const Buffers& buffers);

/// Compiles and loads what run_forward will launch.
void prepare_forward(const Problem& problem, const Plan& plan);

/// What the kernel is given. Reads no device memory.
ForwardArgs forward_args(const Problem& problem, const Plan& plan, const Buffers& buffers);

}  // namespace narrows::cuda
