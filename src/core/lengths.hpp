// Rules for the int32 tensors that say how long each sequence is and where it lies.
#pragma once

#include "core/tensors.hpp"

namespace narrows {

/// One of the tensors whose values are read here on a CPU alone: on a GPU they may not be known before the kernel runs, which
/// then checks them.
bool any_lengths(const Options& options);
inline bool are_read(const Device& device) { return device.kind == DeviceKind::cpu; }

/// A (count) int32 tensor on the call's device.
Indices check_indices(std::string_view argument, const Tensor& tensor, const Device& device, i64 count,
                      std::string_view named);
/// A (batch + 1) tensor of row bounds: from 0, not falling, at most `rows`. Returns the longest sequence, or what it is at
/// most where the values are not read.
struct Bounds {
  Indices values;
  i64 longest;
};
Bounds check_bounds(std::string_view argument, const Tensor& tensor, const Device& device, i64 batch, i64 rows);

/// cu_seqlens_* and seqused_* of q and k; fills max_queries and max_keys of all but cache calls.
void check_lengths(Call& call, const Options& options);

}  // namespace narrows
