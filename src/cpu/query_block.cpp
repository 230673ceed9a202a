#include "cpu/query_block.hpp"

#include "cpu/cache.hpp"
#include "cpu/prefetch.hpp"
#include "cpu/rotary.hpp"

#include <algorithm>
#include <cmath>
#include <memory>

namespace narrows::cpu {
namespace {

template <class T> std::size_t size(T count) { return static_cast<std::size_t>(count); }

}  // namespace

template <class T>
QueryBlock<T>::QueryBlock(const ForwardCall<T>& call, const KvHead& head, Range rows, int thread, i64 slot)
    : call_(call),
      head_(head),
      thread_(thread),
      slot_(slot),
      panel_rows_(call.kernels.rows),
      s_stride_(forward_score_stride(call.key_block)),
      q_(scratch<Packed>(call.layout.queries)),
      s_(scratch<T>(call.layout.scores)),
      o_(scratch<T>(call.layout.outputs)),
      rotated_(call.template scratch<T>(thread, call.layout.rotated)),
      row_scratch_{call.template scratch<T>(thread, call.layout.bias),
                   call.template scratch<std::byte>(thread, call.layout.allowed)},
      keep_(call.template scratch<std::uint8_t>(thread, call.layout.keep)),
      pointers_(call.template scratch<const std::byte*>(thread, call.layout.pointers)),
      numbers_(rows),
      rows_(load_rows(rows)),
      keys_(seen_by(rows_, {0, head.sequence.keys})) {}

template <class T> auto QueryBlock<T>::load_rows(Range rows) -> std::span<Row> {
  const Problem& problem = call_.problem;
  const Sequence& lengths = head_.sequence;
  const i64 group = problem.group();
  Row* const first = scratch<Row>(call_.layout.rows);
  for (i64 number = rows.begin; number < rows.end; ++number) {
    const i64 i = number / group, h = head_.kv_head * group + number % group, position = i + lengths.shift;
    const ScoreRow place{head_.batch, h, i, position,
                         row_keys(problem.rules.mask, lengths.bounds, i, lengths.shift, lengths.keys)};
    std::construct_at(first + (number - rows.begin),
                      Row{place, row_rules(problem, call_.buffers, call_.kernels, head_.batch, h), {}});
  }
  return {first, size(rows.end - rows.begin)};
}

template <class T> Range QueryBlock<T>::seen_by(std::span<const Row> rows, Range keys) const {
  if (head_.sequence.bounds.given()) return hull_of(rows, keys, [](const Row& row) { return row.place.visible; });
  return intersect({rows.front().place.visible.begin, rows.back().place.visible.end}, keys);
}

template <class T> void QueryBlock<T>::run() {
  pack_queries();
  attend(keys_);
  finish_rows();
}

template <class T> void QueryBlock<T>::finish_rows() {
  const i64 count = static_cast<i64>(rows_.size());
  for (i64 row = 0; row < count; ++row) {
    if (call_.buffers.o && row + kRowsAhead < count)
      prefetch_row<Access::write>(target(rows_[size(row + kRowsAhead)]), call_.problem.value_dim,
                                  call_.buffers.o.strides[3]);
    finish(rows_[size(row)], output(row));
  }
}

template <class T> void QueryBlock<T>::run_split(i64 split) {
  const Range keys = keys_of_split(split);
  if (keys.begin >= keys.end) return;
  pack_queries();
  attend(keys);
  keep_partials(split);
}

template <class T> void QueryBlock<T>::keep_partials(i64 split) {
  for (i64 row = 0; row < static_cast<i64>(rows_.size()); ++row) {
    std::construct_at(&call_.partials.sum(head_, split, numbers_.begin + row), rows_[size(row)].sum);
    std::copy_n(output(row), call_.value_width, call_.partials.output(head_, split, numbers_.begin + row));
  }
}

/// In the order of the keys: the order of merging is the order of rounding.
template <class T> void QueryBlock<T>::merge_splits() {
  const bool any = keys_.begin < keys_.end;
  const Range splits{keys_.begin / call_.split_keys, any ? ceil_div(keys_.end, call_.split_keys) : 0};
  for (i64 row = 0; row < static_cast<i64>(rows_.size()); ++row) {
    RunningSum<T>& sum = rows_[size(row)].sum;
    T* const o = output(row);
    std::fill_n(o, call_.value_width, T{0});
    for (i64 split = splits.begin; split < splits.end; ++split) {
      const T* const part = call_.partials.output(head_, split, numbers_.begin + row);
      const JoinedSum<T> both =
          joined<ScalarMath>(call_.units, sum, call_.partials.sum(head_, split, numbers_.begin + row));
      for (i64 x = 0; x < call_.value_width; ++x)
        o[x] =
            both.left_factor * o[x] + both.right_factor * part[x];  // a NaN reaches its row through a factor of 0 too
      sum = both.row;
    }
    finish(rows_[size(row)], o);
  }
}

template <class T> void QueryBlock<T>::pack_queries() {
  const i64 count = static_cast<i64>(rows_.size());
  find_queries();
  for (i64 row = 0; row < count; row += panel_rows_) {
    const i64 rows = std::min(panel_rows_, count - row);
    for (i64 next = row + rows; next < std::min(row + 2 * panel_rows_, count); ++next)
      prefetch_row<Access::read>(pointers_[next], call_.problem.head_dim, call_.buffers.q.strides[3]);
    call_.kernels.pack_query(query_rows(row, rows), call_.units.sign, q_ + call_.packed(row * call_.query_depth));
  }
  std::fill_n(o_, count * call_.value_width, T{0});
}

template <class T> void QueryBlock<T>::find_queries() {
  for (std::size_t row = 0; row < rows_.size(); ++row) {
    const ScoreRow& place = rows_[row].place;
    pointers_[row] = call_.buffers.q.at(head_.batch, head_.sequence.first_query + place.i, place.h);
  }
}

template <class T> Rows QueryBlock<T>::query_rows(i64 first_row, i64 count) {
  const Problem& problem = call_.problem;
  const View& q = call_.buffers.q;
  if (!problem.rotary_pairs) return {pointers_ + first_row, count, problem.head_dim, q.strides[3], q.dtype};
  rotate_queries(first_row, count);
  return {pointers_ + first_row, count, problem.head_dim, sizeof(T), accumulator(problem.dtype)};
}

/// Leaves pointers_ at rotated copies of a panel's rows: the caller's q stays as it is.
template <class T> void QueryBlock<T>::rotate_queries(i64 first_row, i64 count) {
  const Problem& problem = call_.problem;
  const Buffers& buffers = call_.buffers;
  const i64 base = buffers.rotary_base ? buffers.rotary_base[head_.batch] : filled_slots(head_.sequence);
  for (i64 r = 0; r < count; ++r) {
    T* const row = rotated_ + r * problem.head_dim;
    const std::byte*& pointer = pointers_[first_row + r];
    call_.kernels.convert(pointer, buffers.q.strides[3], buffers.q.dtype, problem.head_dim, row);
    rotate(problem, buffers, call_.kernels, base + rows_[size(first_row + r)].place.i, row);
    pointer = reinterpret_cast<const std::byte*>(row);
  }
}

/// All panels against the tiles of `keys`.
template <class T> void QueryBlock<T>::attend(Range keys) {
  if (keys.begin >= keys.end) return;
  const i64 count = static_cast<i64>(rows_.size());
  for (i64 tile = keys.begin / call_.key_block; tile * call_.key_block < keys.end; ++tile) {
    const PackedTile loaded = call_.heads ? packed_tile(call_, head_, tile) : pack_tile(call_, head_, tile, thread_);
    for (i64 row = 0; row < count; row += panel_rows_)
      attend_tile(row, std::min(panel_rows_, count - row), loaded, tile * call_.key_block);
  }
}

/// One panel against the part of one tile that its rows see.
template <class T> void QueryBlock<T>::attend_tile(i64 first_row, i64 count, const PackedTile& tile, i64 first_key) {
  const std::span<Row> panel = rows_.subspan(size(first_row), size(count));
  const Range seen = seen_by(panel, {first_key, first_key + tile.count});
  const Range hull{seen.begin - first_key, seen.end - first_key};
  if (hull.begin >= hull.end) return;
  const i64 strip = call_.kernels.columns;
  const i64 begin = hull.begin / strip * strip, columns = round_up(hull.end, strip) - begin;
  const i64 depth = call_.query_depth;
  call_.kernels.scores(q_ + call_.packed(first_row * depth), static_cast<int>(count),
                       tile.keys + call_.packed(begin * depth), columns / strip, call_.problem.head_dim, s_, s_stride_);
  const Range keys{first_key + begin, first_key + begin + columns};
  for (i64 r = 0; r < count; ++r) {
    T* const s = s_ + r * s_stride_;
    Row& row = panel[size(r)];
    make_logits(call_.buffers, call_.kernels, call_.score_rules, row.rules, row.place, keys, s, row_scratch_);
    add_weights(row, s, keys, output(first_row + r));
  }
  // Columns beyond the hull weigh 0.
  const i64 weighing = round_up(hull.end - begin, call_.kernels.depth);
  call_.kernels.accumulate(s_, s_stride_, static_cast<int>(count), tile.values + call_.packed(begin * strip),
                           tile.count * strip, weighing, call_.problem.value_dim, output(first_row), call_.value_width);
}

template <class T> void QueryBlock<T>::add_weights(Row& row, T* s, Range keys, T* o) {
  const i64 columns = keys.end - keys.begin;
  const T maximum = call_.kernels.maximum(s, columns);
  Reference<T>& reference = row.sum.reference;
  if (maximum > reference.maximum) {
    const Reference<T> raised = reference_of<ScalarMath>(call_.units, maximum);
    // While nothing was visible there is nothing to rescale, and a NaN in the sum stays one.
    if (reference.maximum != -kInfinity<T>) {
      const T factor = std::exp2(rescale_exponent<ScalarMath>(call_.units, reference, raised));
      row.sum.sum *= factor;
      call_.kernels.multiply(o, call_.value_width, factor);
    }
    reference = raised;
  }
  Dropout<T> dropout;
  if (call_.problem.rules.dropout > 0) {
    call_.kernels.keep_bits(call_.dropout, row.place.batch, row.place.h, row.place.i, keys.begin,
                            ceil_div<i64>(columns, 8), keep_);
    dropout = {keep_, keep_factor<T>(call_.dropout)};
  }
  row.sum.sum += call_.kernels.weights(s, columns, call_.units, reference, dropout);
}

template <class T> void QueryBlock<T>::finish(const Row& row, const T* o) {
  const Buffers& buffers = call_.buffers;
  T factor = normalizer(row.sum.sum);
  if (buffers.lse || buffers.sinks) factor *= write_lse(row);
  if (buffers.o)
    call_.kernels.store(o, factor, call_.problem.value_dim, target(row), buffers.o.strides[3], buffers.o.dtype);
}

/// Returns the keys' share beside the sink. In double: an fp32 log-sum-exp of 10^4 would leave it an error of 10^-3.
template <class T> T QueryBlock<T>::write_lse(const Row& row) {
  const Buffers& buffers = call_.buffers;
  const Units<double> units{call_.units.sign, call_.units.c, call_.units.scale, call_.units.natural};
  const Reference<T>& found = row.sum.reference;
  const Reference<double> reference{found.maximum, found.base, found.subtrahend};
  double lse = log_sum_exp<ScalarMath>(units, reference, double{row.sum.sum});
  T share = 1;
  const i64 h = row.place.h;
  if (buffers.sinks) {
    T sink = 0;
    call_.kernels.convert(buffers.sinks.at(h), 0, buffers.sinks.dtype, 1, &sink);
    const Merge<double> merge = merge_of<ScalarMath>(&lse, 1, 1, double{sink});
    share = static_cast<T>(part_weight<ScalarMath>(merge, lse));
    lse = merged_lse<ScalarMath>(merge);
  }
  if (buffers.lse) {
    const T value = static_cast<T>(lse);
    const i64 i = head_.sequence.first_query + row.place.i;
    call_.kernels.store(&value, T{1}, 1, buffers.lse.at(head_.batch, h, i), 0, buffers.lse.dtype);
  }
  return share;
}

template class QueryBlock<float>;
template class QueryBlock<double>;

}  // namespace narrows::cpu
