// Parts of attention joined on a GPU.
#pragma once

#include "core/merge_call.hpp"

namespace narrows::cuda {

/// On call.device and `stream`, which it does not wait for. Throws Error before anything is enqueued.
void run_merge(const MergeCall& call, void* stream);

}  // namespace narrows::cuda
