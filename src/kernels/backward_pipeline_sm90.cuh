// Shared memory of the sm90 backward kernel: its tiles, and the barriers that hand them to and fro.
#pragma once
#include "kernels/backward_scores.cuh"
#include "kernels/descriptor.cuh"
#include "kernels/ptx_sm90.cuh"
#include "kernels/ring.cuh"
#include "shared/backward_sm90_args.h"

namespace narrows {

constexpr int kPartRows = 64;  // of a warpgroup's product
constexpr int kKeyWarpgroups = kBlockKeys / kPartRows;
constexpr int kTurnWarpgroups = kDeterministic ? 1 : 0;  // of which two threads take and pass turns
static_assert(kThreads == kWarpgroup * (kKeyWarpgroups + 1 + kTurnWarpgroups));
static_assert(kWarps == 4 * kKeyWarpgroups && kColumnWarps == 1);
static_assert(kHeadBytes % kChunkBytes == 0 && kValueBytes % kChunkBytes == 0, "tiles are whole chunks of columns");
static_assert(kBlockQueries % kPartRows == 0);

// In the order of addresses: K, V; the stages of Q; those of dO; two of dS^T; the stages of rows' facts; barriers; facts of the keys.
constexpr u32 kFactBytes = kBlockQueries * sizeof(RowFacts);
constexpr u32 kValuesAt = kKeyTile.bytes(), kQueriesAt = kValuesAt + kValueTile.bytes();
constexpr u32 kOutputsAt = kQueriesAt + kStages * kQueryTile.bytes();
constexpr u32 kGradientsAt = kOutputsAt + kStages * kOutputTile.bytes();
constexpr u32 kRowFactsAt = kGradientsAt + 2 * kScoreTile.bytes(), kBarriersAt = kRowFactsAt + kStages * kFactBytes;
constexpr u32 kFactsAt = kBarriersAt + 8 * 16;
static_assert(kStages <= 4, "barrier numbers leave room for no more");

// barrier            count               arrives                                 waits
// keys, values       1                   the loader, with the bytes              keys: every warp; values: those of keys
// queries, outputs   1                   the same; facts come with the queries   those of keys
// gradients_full     8                   a lane of each warp of keys             those of dQ. It also says that Q and dO of the step
//                                                                                before are free
// gradients_empty    4                   a lane of each warp of dQ               those of keys
// turn_begun         2                   who takes turns, who passes them        those of dQ
// turn_done          4                   a lane of each warp of dQ               both
struct Shared {
  u32 base;

  u32 keys() const { return base; }
  u32 values() const { return base + kValuesAt; }
  u32 queries(int stage) const { return base + kQueriesAt + static_cast<u32>(stage * kQueryTile.bytes()); }
  u32 outputs(int stage) const { return base + kOutputsAt + static_cast<u32>(stage * kOutputTile.bytes()); }
  u32 gradients(int half) const { return base + kGradientsAt + static_cast<u32>(half * kScoreTile.bytes()); }
  u32 facts(int stage) const { return base + kRowFactsAt + static_cast<u32>(stage) * kFactBytes; }

  u32 barrier(int number) const { return base + kBarriersAt + static_cast<u32>(8 * number); }
  u32 keys_full() const { return barrier(0); }
  u32 values_full() const { return barrier(1); }
  u32 queries_full(int stage) const { return barrier(2 + stage); }
  u32 outputs_full(int stage) const { return barrier(6 + stage); }
  u32 gradients_full(int half) const { return barrier(10 + half); }
  u32 gradients_empty(int half) const { return barrier(12 + half); }
  u32 turn_begun() const { return barrier(14); }
  u32 turn_done() const { return barrier(15); }
};

inline void init_barriers(const Shared& shared) {
  init_barrier(shared.keys_full(), 1);
  init_barrier(shared.values_full(), 1);
  for (int stage = 0; stage < kStages; ++stage) {
    init_barrier(shared.queries_full(stage), 1);
    init_barrier(shared.outputs_full(stage), 1);
  }
  for (int half = 0; half < 2; ++half) {
    init_barrier(shared.gradients_full(half), kWarps);
    init_barrier(shared.gradients_empty(half), 4);
  }
  init_barrier(shared.turn_begun(), 2);
  init_barrier(shared.turn_done(), 4);
  fence_barrier_init();
}

// Of a step's dS^T: which of the two tiles, and its barriers' phase.
constexpr int half_of(i32 step) { return step & 1; }
constexpr u32 half_phase(i32 step) { return static_cast<u32>(step >> 1 & 1); }

// Deterministic, and rows do not see every key: the last block of keys takes the first turn. With a causal mask all blocks then
// begin where they are the first, and go down one behind the other as far apart as they begin.
constexpr bool kLastKeysFirst = kDeterministic && kLimitsKeys;

// Named barriers: 1 + its number of a warpgroup, and one of all warps of keys.
constexpr int kAllOfKeys = kKeyWarpgroups + 2;

// What every role needs to know of the thread block's keys.
struct Facts {
  KeyBlock block;
  Rows rows[kBlockKeys];  // query rows that see a key; what is behind the last one weighs nothing, so it counts as one
  Rows clean;             // query rows whose Q and dO may be read as they are
  i32 clean_keys;         // the same of K and V; from the block's first key
  u32 index;
  float slopes[kWarps];
  bool far;  // some row of the call has an LSE far out
};

static_assert(kFactsAt + sizeof(Facts) <= kSharedBytes, "the planner's bytes are enough");

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

// What only the warps of keys must know, by these, while the first tiles are on their way.
inline void find_rows(const BackwardSm90Args& args, const KeyBlock& block, Facts& facts) {
  const i32 key = static_cast<i32>(threadIdx.x);
  if (key < kBlockKeys) facts.rows[key] = rows_that_see(args, block, block.first + key);
  if (key == 0) {
    wait_for_previous();
    facts.far = !kNatural && *args.far_rows != 0;
  }
  meet(kAllOfKeys, kWarps * kWarp);
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
