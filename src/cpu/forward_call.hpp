// What the parts of the blocked forward share: the call, and where its packed keys lie.
#pragma once

#include "core/problem.hpp"
#include "cpu/tile_kernels.hpp"
#include "plan/plan.hpp"

namespace narrows::cpu {

constexpr i64 round_up(i64 size, i64 unit) { return ceil_div(size, unit) * unit; }

template <class T> struct ForwardCall {
  const Problem& problem;
  const Buffers& buffers;
  const TileKernels<T>& kernels;
  Units<T> units;
  bool score_rules;  // softcap, ALiBi or bias: scores become logits before the softmax
  i64 query_block;   // query rows of a task
  i64 key_block;     // keys of a tile, a multiple of kernels.columns
  i64 value_width;   // dv in whole strips
};

template <class T> ForwardCall<T> make_forward_call(const Problem& problem, const Plan& plan, const Buffers& buffers);
extern template ForwardCall<float> make_forward_call<float>(const Problem&, const Plan&, const Buffers&);
extern template ForwardCall<double> make_forward_call<double>(const Problem&, const Plan&, const Buffers&);

/// One kv head of one sequence, with the query heads that read it. Its query rows are numbered i * group + (query head within
/// the group): neighbours see nearly the same keys, and a panel is filled even where a sequence has one query.
struct KvHead {
  i64 batch = 0;
  i64 kv_head = 0;
  Sequence sequence;
  Range keys;             // hull of what its rows see
  Range tiles;            // that hold them; tile t is keys [t * key_block, (t + 1) * key_block)
  i64 first_element = 0;  // of its packed tiles
};

/// One tile's packed keys and values.
template <class T> struct PackedTile {
  T* keys;
  T* values;
  i64 count;  // of keys, in whole strips
};

template <class T> KvHead make_kv_head(const ForwardCall<T>& call, i64 batch, i64 kv_head, i64 first_element);
template <class T> i64 packed_elements(const ForwardCall<T>& call, const KvHead& head);
template <class T> PackedTile<T> packed_tile(const ForwardCall<T>& call, const KvHead& head, T* packed, i64 tile);

/// Copies a tile's keys and values to `packed`. What no row can see is not read, or read and replaced by zeros.
template <class T> void pack_tile(const ForwardCall<T>& call, const KvHead& head, T* packed, i64 tile);

}  // namespace narrows::cpu
