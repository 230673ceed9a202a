// P and dS of a block of query rows and a tile of keys, computed again from Q, K, the LSE and dO.
#pragma once

#include "cpu/backward_keys.hpp"
#include "cpu/backward_rows.hpp"

namespace narrows::cpu {

/// What a tile is computed for.
struct TileWants {
  bool gradients = true;        // dS; without it P alone
  bool through_softcap = true;  // dS is of scale * q.k, before softcap; false: of the logits
};

template <class T> class GradientTile {
 public:
  /// In the thread's scratch.
  GradientTile(const BackwardCall<T>& call, TileWants wants, int thread);

  /// Both are zero where a row does not look. Unless null, slopes[head - heads.begin] grows by the sum of |p - j| dS, of the
  /// logits.
  void compute(const QueryRows<T>& rows, const KeyTile& tile, double* slopes);

  /// What was computed, as products read it: the last use of `gradients` as numbers is before.
  void pack(const QueryRows<T>& rows, const KeyTile& tile);

  /// Row-major, a row of the block each. P is after dropout.
  const T* probabilities(i64 row) const { return p_ + row * stride(); }
  const T* gradients(i64 row) const { return ds_ + row * stride(); }
  /// What `pack` made of gradients(row), from a column on: for accumulate.
  const T* narrowed_gradients(i64 row, i64 column) const {
    return reinterpret_cast<const T*>(reinterpret_cast<const Packed*>(gradients(row)) + call_.packed(column));
  }
  /// For accumulate_transposed.
  const Packed* packed_probabilities() const { return p_operand_; }
  const Packed* packed_gradients() const { return ds_operand_; }
  i64 stride() const { return backward_tile_stride(call_.key_block); }

 private:
  void compute_panel(const QueryRows<T>& rows, i64 first_row, int count, const KeyTile& tile, double* slopes);
  void compute_row(const QueryHeads& heads, const GradientRow<T>& row, Range keys, T* p, T* ds, double* slopes);

  const BackwardCall<T>& call_;
  TileWants wants_;
  T *p_, *ds_, *derivative_;
  RowScratch<T> row_scratch_;
  std::uint8_t* keep_;
  Packed *p_transposed_, *ds_transposed_;
  const Packed *p_operand_ = nullptr, *ds_operand_ = nullptr;
};

/// Columns of the tile, in whole strips, in which some of the rows sees a key.
template <class T>
Range seen_columns(const BackwardCall<T>& call, const QueryRows<T>& rows, i64 first_row, i64 count,
                   const KeyTile& tile) {
  const Sequence& lengths = rows.heads().sequence;
  const std::span<const GradientRow<T>> some =
      rows.rows().subspan(static_cast<std::size_t>(first_row), static_cast<std::size_t>(count));
  const Range all{tile.first, tile.first + tile.count};
  const Range keys = lengths.bounds.given()
                         ? hull_of(some, all, [](const GradientRow<T>& row) { return row.visible; })
                         : intersect(key_range(call.problem.rules.mask, {some.front().i, some.back().i + 1},
                                               lengths.shift, lengths.keys),
                                     all);
  if (keys.begin >= keys.end) return {0, 0};
  const Range seen{keys.begin - tile.first, keys.end - tile.first};
  const i64 strip = call.kernels.columns;
  return {seen.begin / strip * strip, ceil_div(seen.end, strip) * strip};
}

extern template class GradientTile<float>;
extern template class GradientTile<double>;

}  // namespace narrows::cpu
