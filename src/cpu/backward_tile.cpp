#include "cpu/backward_tile.hpp"

#include "cpu/row_logits.hpp"

#include <algorithm>

namespace narrows::cpu {

template <class T>
GradientTile<T>::GradientTile(const BackwardCall<T>& call, TileWants wants, int thread)
    : call_(call),
      wants_(wants),
      p_(call.template scratch<T>(thread, call.layout.probabilities)),
      ds_(call.template scratch<T>(thread, call.layout.gradients)),
      derivative_(call.template scratch<T>(thread, call.layout.derivative)),
      row_scratch_{call.template scratch<T>(thread, call.layout.bias),
                   call.template scratch<std::byte>(thread, call.layout.allowed)},
      keep_(call.template scratch<std::uint8_t>(thread, call.layout.keep)),
      p_transposed_(call.template scratch<Packed>(thread, call.layout.transposed_probabilities)),
      ds_transposed_(call.template scratch<Packed>(thread, call.layout.transposed_gradients)) {}

template <class T> void GradientTile<T>::compute(const QueryRows<T>& rows, const KeyTile& tile, double* slopes) {
  for (i64 row = 0; row < rows.count(); row += call_.kernels.rows)
    compute_panel(rows, row, static_cast<int>(std::min<i64>(call_.kernels.rows, rows.count() - row)), tile, slopes);
}

template <class T> void GradientTile<T>::pack(const QueryRows<T>& rows, const KeyTile& tile) {
  const TileKernels<T>& kernels = call_.kernels;
  const i64 count = rows.count(), whole = round_up(count, kernels.depth);
  const auto transposed = [&](T* values, Packed* room) {
    for (i64 row = count; row < whole; ++row) std::fill_n(values + row * stride(), tile.columns, T{0});
    return kernels.transposed(values, stride(), whole, tile.columns, room);
  };
  if (call_.problem.wants_dv) p_operand_ = transposed(p_, p_transposed_);
  if (!wants_.gradients) return;
  if (call_.problem.wants_dk) ds_operand_ = transposed(ds_, ds_transposed_);
  if (!call_.problem.wants_dq) return;
  for (i64 row = 0; row < count; ++row) kernels.narrow(ds_ + row * stride(), tile.columns);
}

template <class T>
void GradientTile<T>::compute_panel(const QueryRows<T>& rows, i64 first_row, int count, const KeyTile& tile,
                                    double* slopes) {
  const Problem& problem = call_.problem;
  const TileKernels<T>& kernels = call_.kernels;
  const Range seen = seen_columns(call_, rows, first_row, count, tile);
  const i64 strips = (seen.end - seen.begin) / kernels.columns;
  T* const p = p_ + first_row * stride();
  T* const ds = wants_.gradients ? ds_ + first_row * stride() : nullptr;
  kernels.scores(rows.queries(first_row), count, tile.keys + call_.packed(seen.begin * call_.query_depth), strips,
                 problem.head_dim, p + seen.begin, stride());
  if (ds)
    kernels.scores(rows.gradients(first_row), count, tile.values + call_.packed(seen.begin * call_.value_depth), strips,
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
              ScoreRow{heads.batch, row.h, row.i, position, row.visible}, keys, p, row_scratch_);
  Dropout<T> dropout;
  if (call_.problem.rules.dropout > 0) {
    kernels.keep_bits(call_.dropout, heads.batch, row.h, row.i, keys.begin, ceil_div<i64>(columns, 8), keep_);
    dropout = {keep_, keep_factor<T>(call_.dropout)};
  }
  kernels.gradients(p, ds, columns, row.reference, row.delta, dropout);
  if (ds && slopes)
    slopes[row.h - heads.heads.begin] +=
        double{kernels.distance_sum(ds, columns, static_cast<T>(position - keys.begin))};
  if (chained) kernels.multiply_each(ds, derivative_, columns);
}

template class GradientTile<float>;
template class GradientTile<double>;

}  // namespace narrows::cpu
