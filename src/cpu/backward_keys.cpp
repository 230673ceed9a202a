#include "cpu/backward_keys.hpp"

#include "cpu/row_logits.hpp"
#include "cpu/seen.hpp"

#include <algorithm>

namespace narrows::cpu {

template <class T>
KeyTiles<T>::KeyTiles(const BackwardCall<T>& call, int thread)
    : call_(call),
      tiles_(call.template scratch<KeyTile>(thread, call.layout.tiles)),
      k_(call.template scratch<const std::byte*>(thread, call.layout.key_pointers)),
      v_(call.template scratch<const std::byte*>(thread, call.layout.value_pointers)),
      packed_(call.template scratch<Packed>(thread, call.layout.keys)) {}

template <class T> void KeyTiles<T>::load(const QueryHeads& heads, Range keys) {
  const Buffers& buffers = call_.buffers;
  const Sequence& lengths = heads.sequence;
  const Range hull = key_range(call_.problem.rules.mask, {0, lengths.queries}, lengths.shift, lengths.keys);
  count_ = 0;
  Packed* next = packed_;
  for (i64 first = keys.begin; first < keys.end; first += call_.key_block) {
    KeyTile tile;
    tile.first = first;
    tile.count = std::min(call_.key_block, keys.end - first);
    tile.columns = round_up(tile.count, call_.kernels.columns);
    tile.keys = next;
    tile.values = tile.keys + call_.packed(tile.columns * call_.query_depth);
    tile.key_rows = tile.values + call_.packed(tile.columns * call_.value_depth);
    next = tile.key_rows + call_.packed(tile.columns * call_.query_width);
    for (i64 key = 0; key < tile.count; ++key) {
      const i64 j = first + key, row = lengths.first_key + j;
      const bool seen = hull.begin <= j && j < hull.end;
      k_[key] = seen ? buffers.k.at(lengths.key_batch, row, heads.kv_head) : nullptr;
      v_[key] = seen ? buffers.v.at(lengths.key_batch, row, heads.kv_head) : nullptr;
    }
    pack(tile);
    const bool finite = call_.kernels.all_finite(tile.keys, (next - tile.keys) / call_.packed_item);
    if (!finite && drop_hidden_keys(heads, tile)) pack(tile);
    tiles_[count_++] = tile;
  }
}

template <class T> void KeyTiles<T>::pack(const KeyTile& tile) {
  const Problem& problem = call_.problem;
  const View &k = call_.buffers.k, &v = call_.buffers.v;
  const Rows keys{k_, tile.count, problem.head_dim, k.strides[3], k.dtype};
  call_.kernels.pack_keys(keys, tile.keys);
  call_.kernels.pack_values(keys, tile.key_rows);
  call_.kernels.pack_keys({v_, tile.count, problem.value_dim, v.strides[3], v.dtype}, tile.values);
}

/// A weight of 0 does not keep NaN or infinity out of a product: keys that mask and bias hide from all rows are taken out.
template <class T> bool KeyTiles<T>::drop_hidden_keys(const QueryHeads& heads, const KeyTile& tile) {
  bool dropped = false;
  for (i64 key = 0; key < tile.count; ++key) {
    if (!k_[key]) continue;
    if (key_is_seen(call_.problem, call_.buffers, call_.kernels, heads.batch, heads.sequence, heads.heads,
                    tile.first + key))
      continue;
    k_[key] = v_[key] = nullptr;
    dropped = true;
  }
  return dropped;
}

template class KeyTiles<float>;
template class KeyTiles<double>;

}  // namespace narrows::cpu
