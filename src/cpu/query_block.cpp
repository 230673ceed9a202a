#include "cpu/query_block.hpp"

#include "shared/merge.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace narrows::cpu {
namespace {

struct ScalarMath {
  template <class T> static T multiply(T a, T b) { return a * b; }
  template <class T> static T fma(T a, T b, T c) { return std::fma(a, b, c); }
  template <class T> static T exp2(T x) { return std::exp2(x); }
  template <class T> static T log2(T x) { return std::log2(x); }
};

// A panel's rows would otherwise lie a power of two apart and fight for the same lines of L1.
constexpr i64 kStrideExtra = 16;

template <class T> std::size_t size(T count) { return static_cast<std::size_t>(count); }

template <class T> void fill(T* s, Range columns, T value) {
  if (columns.begin < columns.end) std::fill(s + columns.begin, s + columns.end, value);
}

}  // namespace

template <class T>
QueryBlock<T>::QueryBlock(const ForwardCall<T>& call)
    : call_(call), panel_rows_(call.kernels.rows), s_stride_(call.key_block + kStrideExtra) {
  const i64 block = round_up(call.query_block, panel_rows_);
  rows_.reserve(size(block));
  q_ = make_scratch<T>(size(block * call.problem.head_dim));
  s_ = make_scratch<T>(size(panel_rows_ * s_stride_));
  o_ = make_scratch<T>(size(block * call.value_width));
  if (call.buffers.bias) bias_ = make_scratch<T>(size(call.key_block));
}

template <class T> void QueryBlock<T>::run(const KvHead& head, T* packed, Range rows) {
  head_ = &head;
  load(rows);
  const i64 count = static_cast<i64>(rows_.size());
  const Sequence& lengths = head.sequence;
  const Mask& mask = call_.problem.rules.mask;
  const Range keys = key_range(mask, {rows_.front().i, rows_.back().i + 1}, lengths.shift, lengths.keys);
  const i64 end = keys.begin < keys.end ? ceil_div(keys.end, call_.key_block) : 0;
  for (i64 tile = keys.begin / call_.key_block; tile < end; ++tile) {
    const PackedTile<T> loaded = packed_tile(call_, head, packed, tile);
    for (i64 row = 0; row < count; row += panel_rows_)
      attend(row, static_cast<int>(std::min(panel_rows_, count - row)), loaded, tile * call_.key_block);
  }
  for (i64 row = 0; row < count; ++row) finish(rows_[size(row)], o_.get() + row * call_.value_width);
}

template <class T> void QueryBlock<T>::load(Range rows) {
  const Problem& problem = call_.problem;
  const Buffers& buffers = call_.buffers;
  const Sequence& lengths = head_->sequence;
  const i64 group = problem.group();
  rows_.clear();
  sources_.clear();
  for (i64 number = rows.begin; number < rows.end; ++number) {
    const i64 i = number / group, h = head_->kv_head * group + number % group;
    T slope = 0;
    if (const View& slopes = buffers.alibi_slopes)
      call_.kernels.convert(slopes.at(head_->batch, h), 0, slopes.dtype, 1, &slope);
    rows_.push_back({i,
                     h,
                     visible_keys(problem.rules.mask, i + lengths.shift, lengths.keys),
                     score_rules<T>(problem.rules.scale, problem.rules.softcap, slope),
                     {},
                     T{0}});
    sources_.push_back(buffers.q.at(head_->batch, lengths.first_query + i, h));
  }
  const i64 count = rows.end - rows.begin;
  for (i64 row = 0; row < count; row += panel_rows_)
    call_.kernels.pack_query({sources_.data() + row, std::min(panel_rows_, count - row), problem.head_dim,
                              buffers.q.strides[3], buffers.q.dtype},
                             call_.units.sign, q_.get() + row * problem.head_dim);
  std::fill_n(o_.get(), count * call_.value_width, T{0});
}

/// One panel against the part of one tile that its rows see.
template <class T> void QueryBlock<T>::attend(i64 first_row, int count, const PackedTile<T>& tile, i64 first_key) {
  const std::span<Row> panel(rows_.data() + first_row, size(count));
  const Range seen{panel.front().visible.begin - first_key, panel.back().visible.end - first_key};
  const Range hull = intersect(seen, {0, tile.count});
  if (hull.begin >= hull.end) return;
  const i64 strip = call_.kernels.columns;
  const i64 begin = hull.begin / strip * strip, columns = round_up(hull.end, strip) - begin;
  const i64 d = call_.problem.head_dim, width = call_.value_width;
  call_.kernels.scores(q_.get() + first_row * d, count, tile.keys + begin * d, columns / strip, d, s_.get(), s_stride_);

  T* const o = o_.get() + first_row * width;
  for (int r = 0; r < count; ++r) {
    T* const s = s_.get() + r * s_stride_;
    make_logits(panel[size(r)], s, {first_key + begin, first_key + begin + columns});
    add_weights(panel[size(r)], s, columns, o + r * width);
  }
  call_.kernels.accumulate(s_.get(), s_stride_, count, tile.values + begin * strip, tile.count * strip, columns,
                           call_.problem.value_dim, o, width);
}

/// Scores of the keys, of which the last may not exist, to logits, and -inf where the row may not look.
template <class T> void QueryBlock<T>::make_logits(const Row& row, T* s, Range keys) {
  const View &bias = call_.buffers.bias, &mask = call_.buffers.mask;
  const Range visible = intersect(row.visible, keys);
  const Range columns{visible.begin - keys.begin, std::max(visible.begin, visible.end) - keys.begin};
  if (columns.begin >= columns.end) return fill(s, {0, keys.end - keys.begin}, -kInfinity<T>);
  if (call_.score_rules) {
    if (bias) {
      fill(bias_.get(), {0, columns.begin}, T{0});
      call_.kernels.convert(bias.at(head_->batch, row.h, row.i, visible.begin), bias.strides[3], bias.dtype,
                            columns.end - columns.begin, bias_.get() + columns.begin);
      fill(bias_.get(), {columns.end, keys.end - keys.begin}, T{0});
    }
    const T position = static_cast<T>(row.i + head_->sequence.shift - keys.begin);
    call_.kernels.logits(s, keys.end - keys.begin, row.rules, position, bias_.get());
  }
  fill(s, {0, columns.begin}, -kInfinity<T>);
  fill(s, {columns.end, keys.end - keys.begin}, -kInfinity<T>);
  if (!mask) return;
  const std::byte* allowed = mask.at(head_->batch, row.h, row.i, visible.begin);
  for (i64 column = columns.begin; column < columns.end; ++column, allowed += mask.strides[3])
    if (*allowed == std::byte{0}) s[column] = -kInfinity<T>;
}

template <class T> void QueryBlock<T>::add_weights(Row& row, T* s, i64 columns, T* o) {
  const T maximum = call_.kernels.maximum(s, columns);
  if (maximum > row.reference.maximum) {
    const Reference<T> raised = reference_of<ScalarMath>(call_.units, maximum);
    // While nothing was visible there is nothing to rescale, and a NaN in the sum stays one.
    if (row.reference.maximum != -kInfinity<T>) {
      const T factor = std::exp2(rescale_exponent<ScalarMath>(call_.units, row.reference, raised));
      row.sum *= factor;
      call_.kernels.multiply(o, call_.value_width, factor);
    }
    row.reference = raised;
  }
  row.sum += call_.kernels.weights(s, columns, call_.units, row.reference);
}

/// In double from here on: an fp32 log-sum-exp of 10^4 would leave a sink's share an error of 10^-3.
template <class T> void QueryBlock<T>::finish(const Row& row, const T* o) {
  const Buffers& buffers = call_.buffers;
  const Units<double> units{call_.units.sign, call_.units.c, call_.units.scale, call_.units.natural};
  const Reference<double> reference{row.reference.maximum, row.reference.base, row.reference.subtrahend};
  double lse = log_sum_exp<ScalarMath>(units, reference, double{row.sum});
  T factor = normalizer(row.sum);
  if (buffers.sinks) {
    T sink = 0;
    call_.kernels.convert(buffers.sinks.at(row.h), 0, buffers.sinks.dtype, 1, &sink);
    const Merge<double> merge = merge_of<ScalarMath>(&lse, 1, 1, double{sink});
    factor *= static_cast<T>(part_weight<ScalarMath>(merge, lse));
    lse = merged_lse<ScalarMath>(merge);
  }
  const i64 i = head_->sequence.first_query + row.i;
  if (const View& target = buffers.o)
    call_.kernels.store(o, factor, call_.problem.value_dim, target.at(head_->batch, i, row.h), target.strides[3],
                        target.dtype);
  if (const View& target = buffers.lse) {
    const T value = static_cast<T>(lse);
    call_.kernels.store(&value, T{1}, 1, target.at(head_->batch, row.h, i), 0, target.dtype);
  }
}

template class QueryBlock<float>;
template class QueryBlock<double>;

}  // namespace narrows::cpu
