#include "cpu/backward_tile.hpp"

#include "cpu/row_logits.hpp"

#include <algorithm>

namespace narrows::cpu {
namespace {

// Rows of a tile would otherwise lie a power of two apart and fight for the same lines of L1.
constexpr i64 kStrideExtra = 16;

}  // namespace

template <class T> i64 GradientTile<T>::stride() const { return call_.key_block + kStrideExtra; }

template <class T>
GradientTile<T>::GradientTile(const BackwardCall<T>& call, TileWants wants)
    : call_(call), wants_(wants), has_dropout_(call.problem.rules.dropout > 0) {
  const auto room = [&](i64 rows) { return make_scratch<T>(static_cast<std::size_t>(rows * stride())); };
  const i64 rows = round_up(call.query_block, call.kernels.rows);
  p_ = room(rows);
  if (wants.gradients) ds_ = room(rows);
  if (call.buffers.bias) bias_ = room(1);
  if (has_dropout_) keep_ = room(1);
  if (call.problem.rules.softcap != 0) derivative_ = room(1);
}

template <class T> void GradientTile<T>::compute(const QueryRows<T>& rows, const KeyTile<T>& tile, double* slopes) {
  for (i64 row = 0; row < rows.count(); row += call_.kernels.rows)
    compute_panel(rows, row, static_cast<int>(std::min<i64>(call_.kernels.rows, rows.count() - row)), tile, slopes);
}

template <class T>
void GradientTile<T>::compute_panel(const QueryRows<T>& rows, i64 first_row, int count, const KeyTile<T>& tile,
                                    double* slopes) {
  const Problem& problem = call_.problem;
  const TileKernels<T>& kernels = call_.kernels;
  const Range seen = seen_columns(call_, rows, first_row, count, tile);
  const i64 strips = (seen.end - seen.begin) / kernels.columns;
  T* const p = p_.get() + first_row * stride();
  T* const ds = wants_.gradients ? ds_.get() + first_row * stride() : nullptr;
  kernels.scores(rows.queries(first_row), count, tile.keys + seen.begin * problem.head_dim, strips, problem.head_dim,
                 p + seen.begin, stride());
  if (ds)
    kernels.scores(rows.gradients(first_row), count, tile.values + seen.begin * problem.value_dim, strips,
                   problem.value_dim, ds + seen.begin, stride());
  for (int r = 0; r < count; ++r) {
    T *const p_row = p + r * stride(), *const ds_row = ds ? ds + r * stride() : nullptr;
    if (strips)
      compute_row(rows.heads(), rows.rows()[static_cast<std::size_t>(first_row + r)],
                  {tile.first + seen.begin, tile.first + seen.end}, p_row + seen.begin,
                  ds ? ds_row + seen.begin : nullptr, slopes);
    for (T* row : {p_row, ds_row}) {
      if (!row) continue;
      fill_columns(row, {0, seen.begin}, T{0});
      fill_columns(row, {seen.end, tile.columns}, T{0});
    }
  }
}

/// In place: scores to P, and dO V^T to dS.
template <class T>
void GradientTile<T>::compute_row(const QueryHeads& heads, const GradientRow<T>& row, Range keys, T* p, T* ds,
                                  double* slopes) {
  const TileKernels<T>& kernels = call_.kernels;
  const i64 columns = keys.end - keys.begin, position = row.i + heads.sequence.shift;
  const bool chained = ds && wants_.through_softcap && call_.problem.rules.softcap != 0;
  if (chained) kernels.softcap_derivatives(p, columns, row.rules, derivative_.get());
  make_logits(call_.buffers, kernels, call_.score_rules, row.rules,
              ScoreRow{heads.batch, row.h, row.i, position, row.visible}, keys, p, bias_.get());
  if (has_dropout_) {
    draw_dropout(heads, row, keys);
    if (ds) kernels.multiply_each(ds, keep_.get(), columns);
  }
  kernels.gradients(p, ds, columns, row.reference, row.delta);
  if (has_dropout_) kernels.multiply_each(p, keep_.get(), columns);
  if (ds && slopes)
    slopes[row.h - heads.heads.begin] +=
        double{kernels.distance_sum(ds, columns, static_cast<T>(position - keys.begin))};
  if (chained) kernels.multiply_each(ds, derivative_.get(), columns);
}

/// What dropout multiplies the row's probabilities by.
template <class T> void GradientTile<T>::draw_dropout(const QueryHeads& heads, const GradientRow<T>& row, Range keys) {
  const i64 columns = keys.end - keys.begin;
  std::fill_n(keep_.get(), columns, T{1});
  drop(call_.dropout, heads.batch, row.h, row.i, keys.begin, columns, keep_.get());
}

template class GradientTile<float>;
template class GradientTile<double>;

}  // namespace narrows::cpu
