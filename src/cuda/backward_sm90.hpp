// The kernel of family sm90 in a backward call: dK, dV and the sums of dQ. The call's others are family sm80's.
#pragma once

#include "cuda/kernel.hpp"
#include "plan/plan.hpp"
#include "shared/backward_sm90_args.h"

namespace narrows::cuda {

/// Compiles and loads it where that has not happened; `stream` must not be captured then.
const Kernel& backward_sm90_kernel(const Problem& problem, Stream stream);
void prepare_backward_sm90(const Problem& problem);

/// blocks: of keys.
Grid backward_sm90_grid(const Problem& problem, const Plan& plan, i64 blocks);
/// common: what every kernel of the call is given.
BackwardSm90Args backward_sm90_args(const BackwardArgs& common, const Problem& problem, const Plan& plan,
                                    const Buffers& buffers);

}  // namespace narrows::cuda
