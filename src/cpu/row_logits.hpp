// One query row's scores of some keys to logits: the score rules, and -inf where the row may not look.
#pragma once

#include "core/problem.hpp"
#include "cpu/tile_kernels.hpp"

#include <algorithm>
#include <cmath>

namespace narrows::cpu {

struct ScalarMath {
  template <class T> static T multiply(T a, T b) { return a * b; }
  template <class T> static T fma(T a, T b, T c) { return std::fma(a, b, c); }
  template <class T> static T exp2(T x) { return std::exp2(x); }
  template <class T> static T log2(T x) { return std::log2(x); }
};

inline bool has_score_rules(const Problem& problem, const Buffers& buffers) {
  return problem.rules.softcap != 0 || buffers.alibi_slopes || buffers.bias;
}

template <class T>
ScoreRules<T> row_rules(const Problem& problem, const Buffers& buffers, const TileKernels<T>& kernels, i64 batch,
                        i64 h) {
  T slope = 0;
  if (const View& slopes = buffers.alibi_slopes) kernels.convert(slopes.at(batch, h), 0, slopes.dtype, 1, &slope);
  return score_rules<T>(problem.rules.scale, problem.rules.softcap, slope);
}

struct ScoreRow {
  i64 batch, h, i;
  i64 position;
  Range visible;  // keys, before mask and bias
};

/// Of `keys`, from the first to the last that one of the rows sees; visible(row): what each does, in any order.
template <class Rows, class Visible> Range hull_of(const Rows& rows, Range keys, const Visible& visible) {
  Range hull{keys.end, keys.begin};
  for (const auto& row : rows) {
    const Range seen = intersect(visible(row), keys);
    if (seen.begin < seen.end) hull = {std::min(hull.begin, seen.begin), std::max(hull.end, seen.end)};
  }
  return hull.begin < hull.end ? hull : Range{0, 0};
}

template <class T> void fill_columns(T* s, Range columns, T value) {
  if (columns.begin < columns.end) std::fill(s + columns.begin, s + columns.end, value);
}

/// Room for a tile's keys, where the call has a bias or a mask.
template <class T> struct RowScratch {
  T* bias;
  std::byte* allowed;
};

/// -inf for the keys of `visible`, the first of which is column 0, that the mask hides.
template <class T>
void hide_masked(const View& mask, const TileKernels<T>& kernels, const ScoreRow& row, Range visible, T* s,
                 std::byte* scratch) {
  const std::byte* allowed = mask.at(row.batch, row.h, row.i, visible.begin);
  const i64 stride = mask.strides[3], count = visible.end - visible.begin;
  if (stride != 1) {
    for (i64 key = 0; key < count; ++key) scratch[key] = allowed[key * stride];
    allowed = scratch;
  }
  kernels.hide(s, count, allowed);
}

/// keys: of s, the last of which may not exist.
template <class T>
void make_logits(const Buffers& buffers, const TileKernels<T>& kernels, bool with_rules, const ScoreRules<T>& rules,
                 const ScoreRow& row, Range keys, T* s, const RowScratch<T>& scratch) {
  const Range visible = intersect(row.visible, keys);
  const Range columns{visible.begin - keys.begin, std::max(visible.begin, visible.end) - keys.begin};
  const i64 count = keys.end - keys.begin;
  if (columns.begin >= columns.end) return fill_columns(s, {0, count}, -kInfinity<T>);
  if (with_rules) {
    const View& given = buffers.bias;
    if (given) {
      T* const bias = scratch.bias;
      fill_columns(bias, {0, columns.begin}, T{0});
      kernels.convert(given.at(row.batch, row.h, row.i, visible.begin), given.strides[3], given.dtype,
                      columns.end - columns.begin, bias + columns.begin);
      fill_columns(bias, {columns.end, count}, T{0});
    }
    kernels.logits(s, count, rules, static_cast<T>(row.position - keys.begin), given ? scratch.bias : nullptr);
  }
  fill_columns(s, {0, columns.begin}, -kInfinity<T>);
  fill_columns(s, {columns.end, count}, -kInfinity<T>);
  if (buffers.mask) hide_masked(buffers.mask, kernels, row, visible, s + columns.begin, scratch.allowed);
}

}  // namespace narrows::cpu
