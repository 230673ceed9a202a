// Merging attention over several sets of keys, and its gradient.
#pragma once

#include "core/merge_call.hpp"

namespace narrows::cpu {

/// Bits do not depend on `threads`; an output may be one of the parts, with its strides.
void run_merge(const MergeCall& call, int threads);
void run_merge_backward(const MergeCall& call, int threads);

}  // namespace narrows::cpu
