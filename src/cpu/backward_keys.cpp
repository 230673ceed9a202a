#include "cpu/backward_keys.hpp"

#include "cpu/row_logits.hpp"
#include "cpu/seen.hpp"

#include <algorithm>

namespace narrows::cpu {
namespace {

template <class T> i64 elements_of_key(const BackwardCall<T>& call) {
  return call.problem.head_dim + call.problem.value_dim + call.query_width;
}

}  // namespace

template <class T>
KeyTiles<T>::KeyTiles(const BackwardCall<T>& call, i64 keys)
    : call_(call),
      k_(static_cast<std::size_t>(call.key_block)),
      v_(static_cast<std::size_t>(call.key_block)),
      packed_(make_scratch<T>(static_cast<std::size_t>(round_up(keys, call.kernels.columns) * elements_of_key(call)))) {
  tiles_.reserve(static_cast<std::size_t>(ceil_div(keys, call.key_block)));
}

template <class T> void KeyTiles<T>::load(const QueryHeads& heads, Range keys) {
  const Buffers& buffers = call_.buffers;
  const Sequence& lengths = heads.sequence;
  const Range hull = key_range(call_.problem.rules.mask, {0, lengths.queries}, lengths.shift, lengths.keys);
  tiles_.clear();
  T* next = packed_.get();
  for (i64 first = keys.begin; first < keys.end; first += call_.key_block) {
    KeyTile<T> tile;
    tile.first = first;
    tile.count = std::min(call_.key_block, keys.end - first);
    tile.columns = round_up(tile.count, call_.kernels.columns);
    tile.keys = next;
    tile.values = tile.keys + tile.columns * call_.problem.head_dim;
    tile.key_rows = tile.values + tile.columns * call_.problem.value_dim;
    next = tile.key_rows + tile.columns * call_.query_width;
    for (i64 key = 0; key < tile.count; ++key) {
      const i64 j = first + key, row = lengths.first_key + j;
      const bool seen = hull.begin <= j && j < hull.end;
      k_[static_cast<std::size_t>(key)] = seen ? buffers.k.at(lengths.key_batch, row, heads.kv_head) : nullptr;
      v_[static_cast<std::size_t>(key)] = seen ? buffers.v.at(lengths.key_batch, row, heads.kv_head) : nullptr;
    }
    pack(tile);
    const bool finite = call_.kernels.all_finite(tile.keys, next - tile.keys);
    if (!finite && drop_hidden_keys(heads, tile)) pack(tile);
    tiles_.push_back(tile);
  }
}

template <class T> void KeyTiles<T>::pack(const KeyTile<T>& tile) {
  const Problem& problem = call_.problem;
  const View &k = call_.buffers.k, &v = call_.buffers.v;
  const Rows keys{k_.data(), tile.count, problem.head_dim, k.strides[3], k.dtype};
  call_.kernels.pack_keys(keys, tile.keys);
  call_.kernels.pack_values(keys, tile.key_rows);
  call_.kernels.pack_keys({v_.data(), tile.count, problem.value_dim, v.strides[3], v.dtype}, tile.values);
}

/// A weight of 0 does not keep NaN or infinity out of a product: keys that mask and bias hide from all rows are taken out.
template <class T> bool KeyTiles<T>::drop_hidden_keys(const QueryHeads& heads, const KeyTile<T>& tile) {
  bool dropped = false;
  for (i64 key = 0; key < tile.count; ++key) {
    const std::size_t at = static_cast<std::size_t>(key);
    if (!k_[at]) continue;
    if (key_is_seen(call_.problem, call_.buffers, call_.kernels, heads.batch, heads.sequence, heads.heads,
                    tile.first + key))
      continue;
    k_[at] = v_[at] = nullptr;
    dropped = true;
  }
  return dropped;
}

template class KeyTiles<float>;
template class KeyTiles<double>;

}  // namespace narrows::cpu
