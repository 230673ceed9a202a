// Packing K and V: once for each kv head, shared by its query heads and by all query blocks.
#include "cpu/cache.hpp"
#include "cpu/forward_call.hpp"
#include "cpu/seen.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <span>

namespace narrows::cpu {
namespace {

template <class T> i64 keys_of_tile(const ForwardCall<T>& call, const KvHead& head, i64 tile) {
  const i64 left = head.sequence.keys - tile * call.key_block;
  return round_up(std::min(left, call.key_block), call.kernels.columns);
}

template <class T> PackedTile tile_at(const ForwardCall<T>& call, const KvHead& head, i64 tile, Packed* start) {
  const i64 count = keys_of_tile(call, head, tile);
  return {start, start + call.packed(count * call.query_depth), count};
}

/// A hidden key must not reach any row, but a weight of 0 times a value of NaN would: such rows are taken out.
template <class T>
bool drop_hidden_values(const ForwardCall<T>& call, const KvHead& head, i64 first_key,
                        std::span<const std::byte*> rows) {
  const View& v = call.buffers.v;
  const i64 group = call.problem.group(), count = call.problem.value_dim;
  const Range heads{head.kv_head * group, (head.kv_head + 1) * group};
  std::array<T, kMostValueDim> values;
  bool dropped = false;
  for (std::size_t key = 0; key < rows.size(); ++key) {
    if (!rows[key]) continue;
    call.kernels.convert(rows[key], v.strides[3], v.dtype, count, values.data());
    if (std::all_of(values.begin(), values.begin() + count, [](T value) { return std::isfinite(value); })) continue;
    if (key_is_seen(call.problem, call.buffers, call.kernels, head.batch, head.sequence, heads,
                    first_key + static_cast<i64>(key)))
      continue;
    rows[key] = nullptr;
    dropped = true;
  }
  return dropped;
}

}  // namespace

template <class T> KvHead make_kv_head(const ForwardCall<T>& call, i64 batch, i64 kv_head) {
  KvHead head;
  head.batch = batch;
  head.kv_head = kv_head;
  head.sequence = sequence(call.problem, call.buffers, batch);
  const Sequence& lengths = head.sequence;
  head.keys = key_range(call.problem.rules.mask, lengths.bounds, {0, lengths.queries}, lengths.shift, lengths.keys);
  if (head.keys.begin < head.keys.end)
    head.tiles = {head.keys.begin / call.key_block, ceil_div(head.keys.end, call.key_block)};
  return head;
}

template <class T> i64 packed_elements(const ForwardCall<T>& call, const KvHead& head) {
  if (head.tiles.begin == head.tiles.end) return 0;
  const i64 keys =
      (head.tiles.end - 1 - head.tiles.begin) * call.key_block + keys_of_tile(call, head, head.tiles.end - 1);
  return keys * (call.query_depth + call.value_width);
}

template <class T> PackedTile packed_tile(const ForwardCall<T>& call, const KvHead& head, i64 tile) {
  const i64 keys_before = (tile - head.tiles.begin) * call.key_block;
  return tile_at(call, head, tile,
                 call.heads + call.packed(head.first_element + keys_before * (call.query_depth + call.value_width)));
}

template <class T> PackedTile pack_tile(const ForwardCall<T>& call, const KvHead& head, i64 tile, int thread) {
  const Problem& problem = call.problem;
  const View &k = call.buffers.k, &v = call.buffers.v;
  const PackedTile target = call.heads
                                ? packed_tile(call, head, tile)
                                : tile_at(call, head, tile, call.template scratch<Packed>(thread, call.layout.tile));
  const i64 first = tile * call.key_block;
  const Range seen = intersect(head.keys, {first, first + target.count});
  const std::span<const std::byte*> rows(call.template scratch<const std::byte*>(thread, call.layout.pointers),
                                         static_cast<std::size_t>(target.count));
  std::fill(rows.begin(), rows.end(), nullptr);
  const auto point_into = [&](const View& view) {
    for (i64 j = seen.begin; j < seen.end; ++j)
      rows[static_cast<std::size_t>(j - first)] = key_row(problem, call.buffers, view, head.sequence, j, head.kv_head);
  };
  point_into(k);
  call.kernels.pack_keys({rows.data(), target.count, problem.head_dim, k.strides[3], k.dtype}, target.keys);
  point_into(v);
  const Rows values{rows.data(), target.count, problem.value_dim, v.strides[3], v.dtype};
  call.kernels.pack_values(values, target.values);
  if (!call.kernels.all_finite(target.values, target.count * call.value_width) &&
      drop_hidden_values(call, head, first, rows))
    call.kernels.pack_values(values, target.values);
  return target;
}

template KvHead make_kv_head(const ForwardCall<float>&, i64, i64);
template KvHead make_kv_head(const ForwardCall<double>&, i64, i64);
template i64 packed_elements(const ForwardCall<float>&, const KvHead&);
template i64 packed_elements(const ForwardCall<double>&, const KvHead&);
template PackedTile packed_tile(const ForwardCall<float>&, const KvHead&, i64);
template PackedTile packed_tile(const ForwardCall<double>&, const KvHead&, i64);
template PackedTile pack_tile(const ForwardCall<float>&, const KvHead&, i64, int);
template PackedTile pack_tile(const ForwardCall<double>&, const KvHead&, i64, int);

}  // namespace narrows::cpu
