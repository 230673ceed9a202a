// What decoding asks of an instruction set: products of a few query rows with rows of K and V where they lie, in the storage
// type. Each row of K and V is read from memory once for all query rows, and converted in registers.
#pragma once

#include "core/types.hpp"

#include <cstddef>

namespace narrows::cpu {

/// Rows that are read later: a kernel asks for them while it works, and does not read them.
struct LaterRows {
  const std::byte* const* row = nullptr;
  i64 count = 0;
  i64 bytes = 0;  // of a row
};

/// Rows of consecutive elements.
struct PlacedRows {
  const std::byte* const* row;
  i64 count;
  i64 length;  // elements, a multiple of `lanes`
  DType dtype;
  LaterRows later = {};
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
