#include "cpu/backward_tile.hpp"

#include "cpu/row_logits.hpp"

#include <algorithm>

namespace narrows::cpu {

template <class T>
GradientTile<T>::GradientTile(const BackwardCall<T>& call, TileWants wants, int thread)
    : call_(call),
      wants_(wants),
      has_dropout_(call.problem.rules.dropout > 0),
      p_(call.template scratch<T>(thread, call.layout.probabilities)),
      ds_(call.template scratch<T>(thread, call.layout.gradients)),
      bias_(call.template scratch<T>(thread, call.layout.bias)),
      keep_(call.template scratch<T>(thread, call.layout.keep)),
      derivative_(call.template scratch<T>(thread, call.layout.derivative)) {}

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
  T* const p = p_ + first_row * stride();
  T* const ds = wants_.gradients ? ds_ + first_row * stride() : nullptr;
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
  if (chained) kernels.softcap_derivatives(p, columns, row.rules, derivative_);
  make_logits(call_.buffers, kernels, call_.score_rules, row.rules,
              ScoreRow{heads.batch, row.h, row.i, position, row.visible}, keys, p, bias_);
  if (has_dropout_) {
    draw_dropout(heads, row, keys);
    if (ds) kernels.multiply_each(ds, keep_, columns);
  }
  kernels.gradients(p, ds, columns, row.reference, row.delta);
  if (has_dropout_) kernels.multiply_each(p, keep_, columns);
  if (ds && slopes)
    slopes[row.h - heads.heads.begin] +=
        double{kernels.distance_sum(ds, columns, static_cast<T>(position - keys.begin))};
  if (chained) kernels.multiply_each(ds, derivative_, columns);
}

/// What dropout multiplies the row's probabilities by.
template <class T> void GradientTile<T>::draw_dropout(const QueryHeads& heads, const GradientRow<T>& row, Range keys) {
  const i64 columns = keys.end - keys.begin;
  std::fill_n(keep_, columns, T{1});
  drop(call_.dropout, heads.batch, row.h, row.i, keys.begin, columns, keep_);
}

template class GradientTile<float>;
template class GradientTile<double>;

}  // namespace narrows::cpu
