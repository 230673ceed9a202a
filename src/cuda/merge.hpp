// Parts of attention joined on a GPU.
#pragma once

#include "core/merge_call.hpp"

namespace narrows::cuda {

/// On call.device and `stream`, which it does not wait for. Throws Error before anything is enqueued.
void run_merge(const MergeCall& call, void* stream);
/// The same of its gradient, with memory of its own for a few numbers of each row.
void run_merge_backward(const MergeCall& call, void* stream);

}  // namespace narrows::cuda
