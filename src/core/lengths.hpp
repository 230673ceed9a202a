// Rules for the int32 tensors that say how long each sequence is and where it lies.
#pragma once

#include "core/tensors.hpp"

namespace narrows {

/// A (count) int32 tensor in host memory.
Indices check_indices(std::string_view argument, const Tensor& tensor, i64 count, std::string_view named);
/// A (batch + 1) tensor of row bounds: from 0, not falling, at most `rows`. Returns the longest sequence.
struct Bounds {
  Indices values;
  i64 longest;
};
Bounds check_bounds(std::string_view argument, const Tensor& tensor, i64 batch, i64 rows);

/// cu_seqlens_* and seqused_* of q, k and k_new; fills batch, max_queries and max_keys of all but cache calls.
void check_lengths(Call& call, const Options& options);

}  // namespace narrows
