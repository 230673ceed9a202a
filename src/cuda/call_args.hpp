// From a call's Problem and Buffers to what every kernel of it is given.
#pragma once

#include "core/problem.hpp"
#include "shared/call_args.h"

namespace narrows::cuda {

TensorArg tensor_arg(const View& view);

/// The planner has seen to what is not a size of a bias or a mask.
i32 narrow(i64 size);

/// natural: scores are logits already when they are exponentiated.
void set_call_args(CallArgs& args, const Problem& problem, const Buffers& buffers, bool natural);

}  // namespace narrows::cuda
