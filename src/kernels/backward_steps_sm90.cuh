// What the roles of the sm90 backward kernels know of a thread block's keys, and their steps over the query rows that see them.
#pragma once
#include "kernels/backward_scores.cuh"
#include "kernels/descriptor.cuh"
#include "kernels/ptx_sm90.cuh"
#include "shared/backward_sm90_args.h"

namespace narrows {

constexpr int kPartRows = 64;  // of a warpgroup's product
static_assert(kHeadBytes % kChunkBytes == 0 && kValueBytes % kChunkBytes == 0, "tiles are whole chunks of columns");

// A cluster of kCluster thread blocks shares a block of keys.
constexpr int kOwnKeys = kBlockKeys / kCluster, kOwnWarps = kWarps / kCluster;  // that make their scores

constexpr u32 kFactBytes = kBlockQueries * sizeof(RowFacts);

// Of a step's dS^T: which of the two tiles, and its barriers' phase.
constexpr int half_of(i32 step) { return step & 1; }
constexpr u32 half_phase(i32 step) { return static_cast<u32>(step >> 1 & 1); }

// Deterministic, and rows do not see every key: the last block of keys takes the first turn. With a causal mask all blocks then
// begin where they are the first, and go down one behind the other as far apart as they begin.
constexpr bool kLastKeysFirst = kDeterministic && kLimitsKeys;

// What every role needs to know of the thread block's keys.
struct Facts {
  KeyBlock block;       // of all thread blocks of the cluster
  Rows rows[kOwnKeys];  // query rows that see a key; what is behind the last one weighs nothing, so it counts as one
  Rows clean;           // query rows whose Q and dO may be read as they are
  i32 clean_keys;       // the same of K and V; from the block's first key
  u32 index;
  float slopes[kOwnWarps];
  bool far;  // some row of the call has an LSE far out
};

constexpr i32 kMostRow = 0x7fffffff;

// Query rows that see key j of the block's sequence.
inline Rows rows_that_see(const CallArgs& args, const KeyBlock& block, i32 j) {
  if (j >= block.keys) return {0, 0};
  if constexpr (!kLimitsKeys) return {0, kMostRow};
  const Rows rows = query_rows(visible_queries(args.visibility, j, block.queries, block.shift));
  return {rows.begin, rows.end == block.queries ? kMostRow : rows.end};
}

// By a thread.
inline void find_facts(const BackwardSm90Args& args, const KeyBlock& block, Facts& facts) {
  facts.block = block;
  // Behind the tensor the engine fills in zeros.
  const bool last = !is_varlen(args.cu_seqlens_q) && block.seeing.end == args.query_rows;
  facts.clean = {block.seeing.begin, last ? kMostRow : block.seeing.end};
  facts.clean_keys =
      !is_varlen(args.cu_seqlens_k) && block.keys == args.key_rows ? kBlockKeys : block.keys - block.first;
}

// What only the warps that make scores must know, by these, while the first tiles are on their way. They meet behind it.
inline void find_rows(const BackwardSm90Args& args, const KeyBlock& block, int first_own, Facts& facts) {
  const i32 key = static_cast<i32>(threadIdx.x);
  if (key < kOwnKeys) facts.rows[key] = rows_that_see(args, block, block.first + first_own + key);
  if (key == 0) {
    wait_for_previous();
    facts.far = !kNatural && *args.far_rows != 0;
  }
}

// A step's query head and block of query rows.
struct Place {
  i32 head, tile;

  void next(const KeyBlock& block) {
    if (++tile != block.end_tile) return;
    tile = block.begin_tile;
    ++head;
  }
};

inline Place first_place(const BackwardArgs& args, const KeyBlock& block) {
  return {block.kv_head * args.group, block.begin_tile};
}
inline i32 step_count(const BackwardArgs& args, const KeyBlock& block) {
  return args.group * max_of(block.end_tile - block.begin_tile, 0);
}

}  // namespace narrows
