// What the parts of the blocked forward share: the call, its scratch, and where its packed keys lie.
#pragma once

#include "cpu/kernel_call.hpp"
#include "plan/cpu_forward.hpp"
#include "shared/merge.h"

namespace narrows::cpu {

/// One kv head of one sequence, with the query heads that read it. Its query rows are numbered i * group + (query head within
/// the group): neighbours see nearly the same keys, and a panel is filled even where a sequence has one query.
struct KvHead {
  i64 batch = 0;
  i64 kv_head = 0;
  Sequence sequence;
  Range keys;   // hull of what its rows see
  Range tiles;  // that hold them; tile t is keys [t * key_block, (t + 1) * key_block)
  // Among the heads that are in scratch together:
  i64 place = 0;          // its number
  i64 first_element = 0;  // of its packed tiles
  i64 first_block = 0;    // number of its first query block
};
static_assert(sizeof(KvHead) <= kKvHeadBytes);

/// Results of each split of a head's keys, until they are merged.
template <class T> struct Partials {
  T* outputs = nullptr;
  RunningSum<T>* sums = nullptr;
  i64 splits = 1, rows = 0, width = 0;  // rows of a head, columns of an output

  i64 place(const KvHead& head, i64 split, i64 row) const { return (head.place * splits + split) * rows + row; }
  T* output(const KvHead& head, i64 split, i64 row) const { return outputs + place(head, split, row) * width; }
  RunningSum<T>& sum(const KvHead& head, i64 split, i64 row) const { return sums[place(head, split, row)]; }
};
static_assert(sizeof(RunningSum<double>) <= kRunningSumBytes);

template <class T> struct ForwardCall : KernelCall<T> {
  i64 split_keys = kMaxCount;  // keys of a split, a multiple of key_block

  Packed* heads = nullptr;  // tiles of whole heads; null: a task packs the tiles that it reads
  Partials<T> partials{};
  std::byte* progress = nullptr;  // of the heads that are in scratch together
  std::byte* threads = nullptr;
  ForwardThreadScratch layout{};  // of each thread's part

  template <class Part> Part* scratch(int thread, i64 start) const {
    return reinterpret_cast<Part*>(threads + thread * layout.bytes + start);
  }
};

/// One tile's packed keys and values.
struct PackedTile {
  Packed* keys;
  Packed* values;
  i64 count;  // of keys, in whole strips
};

template <class T> KvHead make_kv_head(const ForwardCall<T>& call, i64 batch, i64 kv_head);
template <class T> i64 packed_elements(const ForwardCall<T>& call, const KvHead& head);
/// A tile of a head that has been packed ahead.
template <class T> PackedTile packed_tile(const ForwardCall<T>& call, const KvHead& head, i64 tile);

/// Packs a tile to its place in call.heads, or in the thread's scratch. What no row can see is not read, or read and replaced
/// by zeros.
template <class T> PackedTile pack_tile(const ForwardCall<T>& call, const KvHead& head, i64 tile, int thread);

}  // namespace narrows::cpu
