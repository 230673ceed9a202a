// A forward call by the kernel of family sm90.
#pragma once

#include "cuda/forward.hpp"
#include "shared/forward_sm90_args.h"

namespace narrows::cuda {

/// As run_forward and prepare_forward, which call them.
void run_forward_sm90(const Problem& problem, const Plan& plan, const Buffers& buffers);
void prepare_forward_sm90(const Problem& problem);

}  // namespace narrows::cuda
