// What decoding asks of an instruction set: products of a few query rows with rows of K and V where they lie, in the storage
// type. Each row of K and V is read from memory once for all query rows, and converted in registers.
#pragma once

#include "core/types.hpp"

#include <cstddef>

namespace narrows::cpu {

inline constexpr i64 kPlacedAhead = 32;

/// Rows of consecutive elements. `row` has kPlacedAhead entries more than `count`: what is read next, whose start the kernels
/// ask for ahead of its time and do not read.
struct PlacedRows {
  const std::byte* const* row;
  i64 count;
  i64 length;  // elements, a multiple of `lanes`
  DType dtype;
};

/// A result's bits depend on its own query row, key row and weights alone: not on the number of rows, nor on where they lie.
template <class T> struct DecodeKernels {
  int lanes;  // elements of a vector
  /// S[r][key] = q_r . k_key; q is row-major, aligned to 64 bytes with its stride.
  void (*scores)(const T* q, i64 q_stride, i64 count, const PlacedRows& keys, T* s, i64 s_stride);
  /// O += P V; o aligned to 64 bytes with its stride.
  void (*accumulate)(const T* p, i64 p_stride, i64 count, const PlacedRows& values, T* o, i64 o_stride);
};

}  // namespace narrows::cpu
