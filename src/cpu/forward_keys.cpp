// Packing K and V: once for each kv head, shared by its query heads and by all query blocks.
#include "cpu/forward_call.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

namespace narrows::cpu {
namespace {

template <class T> i64 keys_of_tile(const ForwardCall<T>& call, const KvHead& head, i64 tile) {
  const i64 left = head.sequence.keys - tile * call.key_block;
  return round_up(std::min(left, call.key_block), call.kernels.columns);
}

template <class T> T element(const ForwardCall<T>& call, const View& view, const std::byte* address) {
  T value;
  call.kernels.convert(address, 0, view.dtype, 1, &value);
  return value;
}

/// Whether any row sees key j, from the rules, the mask and the bias.
template <class T> bool is_seen(const ForwardCall<T>& call, const KvHead& head, i64 j) {
  const Problem& problem = call.problem;
  const View &mask = call.buffers.mask, &bias = call.buffers.bias;
  const Range rows = visible_queries(problem.rules.mask, j, head.sequence.queries, head.sequence.shift);
  if (!mask && !bias) return rows.begin < rows.end;
  for (i64 i = rows.begin; i < rows.end; ++i)
    for (i64 g = 0; g < problem.group(); ++g) {
      const i64 h = head.kv_head * problem.group() + g;
      if (mask && !std::to_integer<bool>(*mask.at(head.batch, h, i, j))) continue;
      if (!bias || element(call, bias, bias.at(head.batch, h, i, j)) != -kInfinity<T>) return true;
    }
  return false;
}

/// A hidden key must not reach any row, but a weight of 0 times a value of NaN would: such rows are taken out.
template <class T>
bool drop_hidden_values(const ForwardCall<T>& call, const KvHead& head, i64 first_key,
                        std::vector<const std::byte*>& rows) {
  const View& v = call.buffers.v;
  std::vector<T> values(static_cast<std::size_t>(call.problem.value_dim));
  bool dropped = false;
  for (std::size_t key = 0; key < rows.size(); ++key) {
    if (!rows[key]) continue;
    call.kernels.convert(rows[key], v.strides[3], v.dtype, call.problem.value_dim, values.data());
    if (std::all_of(values.begin(), values.end(), [](T value) { return std::isfinite(value); })) continue;
    if (is_seen(call, head, first_key + static_cast<i64>(key))) continue;
    rows[key] = nullptr;
    dropped = true;
  }
  return dropped;
}

}  // namespace

template <class T> KvHead make_kv_head(const ForwardCall<T>& call, i64 batch, i64 kv_head, i64 first_element) {
  KvHead head{batch, kv_head, sequence(call.problem, call.buffers, batch), {}, {}, first_element};
  const Sequence& lengths = head.sequence;
  head.keys = key_range(call.problem.rules.mask, {0, lengths.queries}, lengths.shift, lengths.keys);
  if (head.keys.begin < head.keys.end)
    head.tiles = {head.keys.begin / call.key_block, ceil_div(head.keys.end, call.key_block)};
  return head;
}

template <class T> i64 packed_elements(const ForwardCall<T>& call, const KvHead& head) {
  if (head.tiles.begin == head.tiles.end) return 0;
  const i64 keys =
      (head.tiles.end - 1 - head.tiles.begin) * call.key_block + keys_of_tile(call, head, head.tiles.end - 1);
  return keys * (call.problem.head_dim + call.value_width);
}

template <class T> PackedTile<T> packed_tile(const ForwardCall<T>& call, const KvHead& head, T* packed, i64 tile) {
  const i64 count = keys_of_tile(call, head, tile);
  T* const keys = packed + head.first_element +
                  (tile - head.tiles.begin) * call.key_block * (call.problem.head_dim + call.value_width);
  return {keys, keys + count * call.problem.head_dim, count};
}

template <class T> void pack_tile(const ForwardCall<T>& call, const KvHead& head, T* packed, i64 tile) {
  const View &k = call.buffers.k, &v = call.buffers.v;
  const PackedTile<T> target = packed_tile(call, head, packed, tile);
  const i64 first = tile * call.key_block;
  const Range seen = intersect(head.keys, {first, first + target.count});
  std::vector<const std::byte*> rows(static_cast<std::size_t>(target.count), nullptr);
  const auto point_into = [&](const View& view) {
    for (i64 j = seen.begin; j < seen.end; ++j)
      rows[static_cast<std::size_t>(j - first)] =
          view.at(head.sequence.key_batch, head.sequence.first_key + j, head.kv_head);
  };
  point_into(k);
  call.kernels.pack_keys({rows.data(), target.count, call.problem.head_dim, k.strides[3], k.dtype}, target.keys);
  point_into(v);
  const Rows values{rows.data(), target.count, call.problem.value_dim, v.strides[3], v.dtype};
  call.kernels.pack_values(values, target.values);
  if (!call.kernels.all_finite(target.values, target.count * call.value_width) &&
      drop_hidden_values(call, head, first, rows))
    call.kernels.pack_values(values, target.values);
}

template KvHead make_kv_head(const ForwardCall<float>&, i64, i64, i64);
template KvHead make_kv_head(const ForwardCall<double>&, i64, i64, i64);
template i64 packed_elements(const ForwardCall<float>&, const KvHead&);
template i64 packed_elements(const ForwardCall<double>&, const KvHead&);
template PackedTile<float> packed_tile(const ForwardCall<float>&, const KvHead&, float*, i64);
template PackedTile<double> packed_tile(const ForwardCall<double>&, const KvHead&, double*, i64);
template void pack_tile(const ForwardCall<float>&, const KvHead&, float*, i64);
template void pack_tile(const ForwardCall<double>&, const KvHead&, double*, i64);

}  // namespace narrows::cpu
