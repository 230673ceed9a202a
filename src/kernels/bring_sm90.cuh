// The warps of the sm90 forward kernel that compute nothing: one takes tiles, a thread of another loads K and V, a
// thread of a third loads Q.
#pragma once
#include "kernels/pipeline_sm90.cuh"

namespace narrows {

// Where thread blocks take tiles as they come to them, the next one is taken when so many of a tile's blocks of keys are still to
// be asked for: who had taken it with all of a long tile ahead would be the last at the end, by 2 to 6% of causal calls.
// 0 is 1% slower, 1 to 8 are the same. Where rows are gathered, a page may be a key: that each of a tile's pages is one is then found
// out beside the whole tile before.
constexpr i32 kBlocksAhead = kGathers ? 1 << 20 : 2;

// By who asks for K, before V of block n.
inline void want_next_tile(const Shared& shared, const Keys& blocks, i32 n) {
  if (n == max_of(blocks.begin, min_of(blocks.begin + kBlocksAhead, blocks.end - 1))) arrive(shared.tile_wanted());
}

inline void schedule(const Shared& shared, TileFacts* slots, Scheduler& scheduler) {
  for (u32 round = 0;; ++round) {
    const int slot = static_cast<int>(round % kFactSlots);
    wait_barrier(shared.facts_empty(slot), (round / kFactSlots & 1) ^ 1);
    if (round > 0) {
      if (scheduler.takes_as_it_comes()) wait_barrier(shared.tile_wanted(), (round - 1) & 1);
      scheduler.advance();
    }
    scheduler.find(slots[slot]);
    __syncwarp();
    const bool exists = slots[slot].exists;
    if (lane_index() == 0) arrive(shared.facts_full(slot));
    if (!exists) break;
  }
}

// A tile, in boxes of 64 columns.
template <SmemTile tile> inline void load_tile(u32 to, const TensorMap& map, u32 barrier, BoxPlace from, u64 hint) {
  arrive_expecting(barrier, static_cast<u32>(tile.bytes()));
  for (int chunk = 0; chunk < tile.row_bytes / kChunkBytes; ++chunk, from.column += kChunkColumns)
    load_box(to + static_cast<u32>(chunk * tile.rows * kChunkBytes), map, barrier, from, hint);
}

// The next free stage gets rows of K or V.
template <SmemTile tile>
inline void load_stage(const Stages& stages, Ring& ring, const TensorMap& map, const BoxPlace& from) {
  wait_barrier(stages.empty_barrier(ring), ring.phase ^ 1);
  load_tile<tile>(stages.tile(ring), map, stages.full_barrier(ring), from, kEvictLast);
  ring.next();
}

// One thread; K is one block ahead of V.
inline void bring_keys_and_values(const Shared& shared, const TileFacts* slots, const ForwardSm90Args& args) {
  prefetch_map(args.k_map);
  prefetch_map(args.v_map);
  Ring k, v;
  for (FactsReader reader{shared, slots};; ++reader.round) {
    const TileFacts& facts = reader.wait();
    if (!facts.exists) break;
    const i32 sequence = is_varlen(args.cu_seqlens_k) ? 0 : facts.block.sequence;
    const BoxPlace origin{0, facts.block.first_key, facts.kv_head, sequence};
    const auto place = [&](i32 n) { return BoxPlace{0, origin.row + n * kBlockKeys, origin.head, origin.sequence}; };
    const Keys blocks = facts.blocks;
    reader.release();
    load_stage<kKeyStage>(shared.keys(), k, args.k_map, place(blocks.end - 1));
    // At the start all thread blocks load at once: what the first product needs comes first.
    if (reader.round == 0) wait_barrier(shared.keys().full_barrier({}), 0);
    for (i32 n = blocks.end - 1; n >= blocks.begin; --n) {
      want_next_tile(shared, blocks, n);
      if (n > blocks.begin) load_stage<kKeyStage>(shared.keys(), k, args.k_map, place(n - 1));
      load_stage<kValueStage>(shared.values(), v, args.v_map, place(n));
    }
  }
}

// One thread of another warp, so that a Q that is still in use never holds up K and V.
inline void bring_queries(const Shared& shared, const TileFacts* slots, const ForwardSm90Args& args) {
  prefetch_map(args.q_map);
  QueryRing q;
  for (FactsReader reader{shared, slots};; ++reader.round, q.next()) {
    const TileFacts& facts = reader.wait();
    if (!facts.exists) break;
    BoxPlace from{0, facts.block.first_query + facts.block.first_row, facts.block.head,
                  is_varlen(args.cu_seqlens_q) ? 0 : facts.block.sequence};
    reader.release();
    for (int w = 0; w < kWarpgroups; ++w, from.row += kPartRows) {
      wait_barrier(shared.query_empty(w, q), q.phase ^ 1);
      load_tile<kQueryPart>(shared.query_part(w, q), args.q_map, shared.query_full(w, q), from, kEvictFirst);
    }
  }
}

}  // namespace narrows
