// What the blocked passes ask of an instruction set: operations on tiles that lie in scratch, in the compute type T (float,
// or double for fp64 tensors). They know nothing of masks, heads or sequences.
//
// The register tile is `rows` query rows by `columns` keys (or columns of V). Scratch holds
//   a query panel   [d][rows]: element x of row r at x * rows + r
//   key strips      [keys / columns][d][columns]
//   value strips    [dv / columns][keys][columns]
//   a score panel   [rows][ld], and an output panel [rows][ld], row-major
// with every size in brackets rounded up to whole strips, zeros in what was added, and 64-byte alignment throughout.
//
// A row's results do not depend on how many rows share its panel, and columns whose weight is 0 add exactly nothing.
#pragma once

#include "core/types.hpp"
#include "shared/score.h"

#include <cstddef>
#include <span>
#include <string_view>

namespace narrows::cpu {

/// Rows of a tensor that lie anywhere; a null row is read as zeros.
struct Rows {
  const std::byte* const* row;
  i64 count;
  i64 length;  // elements of a row
  i64 stride;  // bytes between elements
  DType dtype;
};

template <class T> struct TileKernels {
  const char* name;
  int rows, columns;

  /// count <= rows; every element is multiplied by sign.
  void (*pack_query)(const Rows& source, T sign, T* panel);
  void (*pack_keys)(const Rows& source, T* strips);
  void (*pack_values)(const Rows& source, T* strips);
  /// One row to the compute type.
  void (*convert)(const std::byte* row, i64 stride, DType dtype, i64 count, T* out);
  /// count: a multiple of columns, aligned.
  bool (*all_finite)(const T* values, i64 count);

  /// S = Q K^T for `count` rows and `strips` key strips of head dim d.
  void (*scores)(const T* panel, int count, const T* keys, i64 strips, i64 d, T* s, i64 ld);
  /// s to logits by the score rules. position: p - j of column 0. bias: one value a column or null; its -inf select -inf.
  void (*logits)(T* s, i64 columns, const ScoreRules<T>& rules, T position, const T* bias);
  T (*maximum)(const T* s, i64 columns);
  /// s to weights, in place; returns their sum. A score of -inf weighs 0.
  T (*weights)(T* s, i64 columns, const Units<T>& units, const Reference<T>& reference);
  void (*multiply)(T* values, i64 count, T factor);
  /// O += P V: `count` rows, `keys` consecutive keys of the dv-column value strips, strip_stride elements apart.
  void (*accumulate)(const T* p, i64 ld, int count, const T* values, i64 strip_stride, i64 keys, i64 dv, T* o,
                     i64 o_ld);
  /// O += P^T V: row r of O takes column r of P. `keys` are rows of P here, and rows of the strips' matrix as above.
  void (*accumulate_transposed)(const T* p, i64 ld, int count, const T* values, i64 strip_stride, i64 keys, i64 dv,
                                T* o, i64 o_ld);

  /// What the score rules' softcap multiplies a gradient by, from scores before `logits`.
  void (*softcap_derivatives)(const T* s, i64 columns, const ScoreRules<T>& rules, T* out);
  /// Backward of one row: s to P and, unless null, dp to dS = P (dP - delta), in place. A score of -inf gets P = dS = 0,
  /// whatever dp is.
  void (*gradients)(T* s, T* dp, i64 columns, const BackwardReference<T>& reference, T delta);
  /// The sum of |p - j| dS over the columns; position: p - j of column 0.
  T (*distance_sum)(const T* ds, i64 columns, T position);
  void (*multiply_each)(T* values, const T* factors, i64 count);

  /// factor * row, rounded to nearest even; a zero is stored as +0.
  void (*store)(const T* row, T factor, i64 count, std::byte* out, i64 stride, DType dtype);
};

/// The instruction sets that this build has and this CPU can execute, best first; never empty.
template <class T> std::span<const TileKernels<T>* const> available_tile_kernels();

/// The kernels of an instruction set that a plan names. Throws Error where this CPU cannot execute it.
template <class T> const TileKernels<T>& tile_kernels(std::string_view instruction_set);

extern template std::span<const TileKernels<float>* const> available_tile_kernels<float>();
extern template std::span<const TileKernels<double>* const> available_tile_kernels<double>();
extern template const TileKernels<float>& tile_kernels(std::string_view);
extern template const TileKernels<double>& tile_kernels(std::string_view);

/// One family of kernels for both compute types, as each tile_kernels_*.cpp defines it.
struct InstructionSet {
  TileKernels<float> single;
  TileKernels<double> twice;
};
extern const InstructionSet kTileKernelsPortable;
#if defined(__x86_64__)
extern const InstructionSet kTileKernelsAvx2;
extern const InstructionSet kTileKernelsAvx512;
#endif

}  // namespace narrows::cpu
