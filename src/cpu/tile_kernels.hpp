// What the blocked passes ask of an instruction set: operations on tiles that lie in scratch. T is what scores, sums and
// outputs are: float, or double for fp64 tensors. They know nothing of masks, heads or sequences.
//
// The register tile is `rows` query rows by `columns` keys (or columns of V). What a product multiplies is packed, in elements
// of the type `operand` and in an order of the set's own, inside these frames:
//   a query panel   [rows][d]                    a score panel    [rows][ld] of T
//   key strips      [keys / columns][d][columns] an output panel  [rows][ld] of T
//   value strips    [dv / columns][keys][columns]
// keys and dv in whole strips, d in whole `depth`; zeros in what was added; 64-byte alignment. Panels, strips, and `depth`
// keys within value strips stand where their count of elements says.
//
// A row's results do not depend on how many rows share its panel, and columns whose weight is 0 add exactly nothing.
#pragma once

#include "core/types.hpp"
#include "cpu/decode_kernels.hpp"
#include "shared/philox.h"
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

using Packed = std::byte;

/// Which columns dropout keeps, column 0 in the lowest bit of the first byte, and what it multiplies those by.
template <class T> struct Dropout {
  const std::uint8_t* keep = nullptr;  // null: no dropout
  T factor = T{1};
};

template <class T> struct TileKernels {
  const char* name;
  int rows, columns;
  int depth;
  DType operand;

  /// count <= rows; every element is multiplied by sign. Writes up to 64 bytes beyond the panel.
  void (*pack_query)(const Rows& source, T sign, Packed* panel);
  void (*pack_keys)(const Rows& source, Packed* strips);
  void (*pack_values)(const Rows& source, Packed* strips);
  /// One row to T.
  void (*convert)(const std::byte* row, i64 stride, DType dtype, i64 count, T* out);
  /// count: elements, a multiple of columns, aligned.
  bool (*all_finite)(const Packed* values, i64 count);

  /// S = Q K^T for `count` rows and `strips` key strips of head dim d.
  void (*scores)(const Packed* panel, int count, const Packed* keys, i64 strips, i64 d, T* s, i64 ld);
  /// s to logits by the score rules. position: p - j of column 0. bias: one value a column or null; its -inf select -inf.
  void (*logits)(T* s, i64 columns, const ScoreRules<T>& rules, T position, const T* bias);
  /// -inf where allowed, consecutive bytes, is 0; any count and alignment.
  void (*hide)(T* s, i64 columns, const std::byte* allowed);
  T (*maximum)(const T* s, i64 columns);
  /// Scores to weights, in place, as elements of `operand` from the row's start on; returns their sum before dropout. A score
  /// of -inf weighs 0.
  T (*weights)(T* s, i64 columns, const Units<T>& units, const Reference<T>& reference, const Dropout<T>& dropout);
  void (*multiply)(T* values, i64 count, T factor);
  /// O += P V: `count` rows of weights, ld elements of T apart, by `keys` consecutive keys, a multiple of depth, of value
  /// strips of `width` columns, strip_stride elements apart.
  void (*accumulate)(const T* p, i64 ld, int count, const Packed* values, i64 strip_stride, i64 keys, i64 width, T* o,
                     i64 o_ld);

  /// Decisions for the call's keys first_key, ... in `bytes` times 8 bits.
  void (*keep_bits)(const DropoutRule& rule, i64 batch, i64 head, i64 row, i64 first_key, i64 bytes,
                    std::uint8_t* keep);

  /// What the score rules' softcap multiplies a gradient by, from scores before `logits`.
  void (*softcap_derivatives)(const T* s, i64 columns, const ScoreRules<T>& rules, T* out);
  /// Backward of one row: s to P and, unless null, dp to dS = P (dP - delta), in place, both by dropout's rule. A score of
  /// -inf gets P = dS = 0, whatever dp is.
  void (*gradients)(T* s, T* dp, i64 columns, const BackwardReference<T>& reference, T delta,
                    const Dropout<T>& dropout);
  /// The sum of |p - j| dS over the columns; position: p - j of column 0.
  T (*distance_sum)(const T* ds, i64 columns, T position);
  void (*multiply_each)(T* values, const T* factors, i64 count);
  /// A row to elements of `operand`, in place, as `accumulate` reads it.
  void (*narrow)(T* row, i64 columns);
  /// [rows][ld] of T to what accumulate_transposed reads, rows a multiple of depth: `out`, as large, or p itself.
  const Packed* (*transposed)(const T* p, i64 ld, i64 rows, i64 columns, Packed* out);
  /// O += P^T V: row r of O takes column first_column + r of P, for rows [first_row, first_row + keys) of P, multiples of
  /// depth, that are the keys of the value strips.
  void (*accumulate_transposed)(const Packed* p, i64 ld, i64 first_row, i64 first_column, int count,
                                const Packed* values, i64 strip_stride, i64 keys, i64 width, T* o, i64 o_ld);

  /// factor * row, rounded to nearest even; a zero is stored as +0.
  void (*store)(const T* row, T factor, i64 count, std::byte* out, i64 stride, DType dtype);

  DecodeKernels<T> decode;
};

/// The instruction sets that this build has and this CPU can execute, best first; never empty.
template <class T> std::span<const TileKernels<T>* const> available_tile_kernels();

/// The kernels of an instruction set that a plan names. Throws Error where this CPU cannot execute it.
template <class T> const TileKernels<T>& tile_kernels(std::string_view instruction_set);

extern template std::span<const TileKernels<float>* const> available_tile_kernels<float>();
extern template std::span<const TileKernels<double>* const> available_tile_kernels<double>();
extern template const TileKernels<float>& tile_kernels(std::string_view);
extern template const TileKernels<double>& tile_kernels(std::string_view);

/// One set's kernels for both types of scores, as each tile_kernels_*.cpp defines it.
struct InstructionSet {
  TileKernels<float> single;
  TileKernels<double> twice;  // without a name where the set has none: its operands are narrower than a score
};
extern const InstructionSet kTileKernelsPortable;
#if defined(__x86_64__)
extern const InstructionSet kTileKernelsAvx2;
extern const InstructionSet kTileKernelsAvx512;
extern const InstructionSet kTileKernelsAvx512Bf16;
extern const InstructionSet kTileKernelsAmx;
#elif defined(__aarch64__)
extern const InstructionSet kTileKernelsNeon;
#endif

/// Makes tile_kernels() find a set that is not the library's, before any call: tests run whole calls on sets in plain C++.
void add_tile_kernels(const InstructionSet& set);

}  // namespace narrows::cpu
