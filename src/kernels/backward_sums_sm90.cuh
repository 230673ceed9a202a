// The warpgroup of the sm90 backward kernel that brings the tiles of the others, and sums dQ.
#pragma once
#include "kernels/backward_pipeline_sm90.cuh"
#include "kernels/backward_tiles_sm90.cuh"
#include "kernels/backward_turns_sm90.cuh"

namespace narrows {

// ------------------------------------------------------------------------------------------------------------------ bring

constexpr u32 kLoader = kKeyWarpgroups * kWarpgroup;  // the thread

// One thread: K and V once, then Q, dO and the rows' facts, kStages steps ahead.
struct Loader {
  const BackwardSm90Args& args;
  const KeyBlock& block;
  Shared shared;
  Place place;
  i32 left;  // steps
  Ring ring;

  Loader(const BackwardSm90Args& args_, const KeyBlock& block_, const Shared& shared_)
      : args(args_),
        block(block_),
        shared(shared_),
        place(first_place(args_, block_)),
        left(step_count(args_, block_)) {}

  void load_keys() const {
    const BoxPlace from{0, block.first_key + block.first, block.kv_head,
                        is_varlen(args.cu_seqlens_k) ? 0 : block.sequence};
    arrive_expecting(shared.keys_full(), static_cast<u32>(kKeyTile.bytes()));
    load_tile<kKeyTile>(shared.keys(), args.k_map, shared.keys_full(), from, kEvictFirst);
    arrive_expecting(shared.values_full(), static_cast<u32>(kValueTile.bytes()));
    load_tile<kValueTile>(shared.values(), args.v_map, shared.values_full(), from, kEvictFirst);
  }

  // Of the next step, to a stage that is free.
  void load_step() {
    if (left-- <= 0) return;
    const BoxPlace from{0, block.first_query + place.tile * kBlockQueries, place.head,
                        is_varlen(args.cu_seqlens_q) ? 0 : block.sequence};
    const u32 queries = shared.queries_full(ring.stage), outputs = shared.outputs_full(ring.stage);
    arrive_expecting(queries, static_cast<u32>(kQueryTile.bytes()) + kFactBytes);
    load_tile<kQueryTile>(shared.queries(ring.stage), args.q_map, queries, from, kEvictLast);
    load_bytes(shared.facts(ring.stage),
               args.rows + query_block_number(args, block, place.head, place.tile) * kBlockQueries, kFactBytes,
               queries);
    arrive_expecting(outputs, static_cast<u32>(kOutputTile.bytes()));
    load_tile<kOutputTile>(shared.outputs(ring.stage), args.dout_map, outputs, from, kEvictLast);
    place.next(block);
    ring.next();
  }
};

// --------------------------------------------------------------------------------------------------------------------- dQ

// Two threads of a warpgroup of their own take and pass the turns, so that neither the wait for what was added nor the way of the numbers
// holds up the products, nor the one the other.
struct Turns {
  const BackwardSm90Args& args;
  const KeyBlock& block;
  Shared shared;

  // visit(where a group's number stands, the block's own, which of its turns it is)
  template <class Visit> void each_turn(const Visit& visit) const {
    if (args.query_sums == nullptr || step_count(args, block) == 0) return;
    u32 turn = 0;
    for (i32 head = block.kv_head * args.group; head < (block.kv_head + 1) * args.group; ++head)
      for (i32 first = block.begin_tile / kGroup * kGroup; first < block.end_tile; first += kGroup, ++turn)
        visit(args.turns + query_block_number(args, block, head, first) * kWarps,
              turn_number(args, block, first, kGroup), turn);
  }
  // It adds only once the number has been seen: a branch is enough of an order, as what others added before was made by the memory
  // before their number was stored.
  void take() const {
    each_turn([&](const u32* at, u32 number, u32 turn) {
      while (load_relaxed(at) != number) {
      }
      if (turn > 0) wait_barrier(shared.turn_done(), (turn - 1) & 1);
      arrive(shared.turn_begun());
    });
  }
  // A turn begins when the end of the one before has been seen here too: of two ends the first would not be.
  void pass() const {
    arrive(shared.turn_begun());
    each_turn([&](u32* at, u32 number, u32 turn) {
      wait_barrier(shared.turn_done(), turn & 1);
      arrive(shared.turn_begun());
      store_release(at, number + 1);
    });
  }
};

struct Summer {
  const BackwardSm90Args& args;
  const Facts& facts;
  Shared shared;
  int warp;  // within the warpgroup
  Place place;
  u32 turn = 0;  // phase of its barriers

  // 64 query rows and 64 columns of dS K.
  void begin_part(SumsOfChunk& part, int half, int row_part, int chunk) const {
    const u64 a = descriptor_along_rows(shared.gradients(half) + static_cast<u32>(row_part * kBlockKeys * kChunkBytes));
    const u64 b = descriptor_down_columns(shared.keys() + static_cast<u32>(chunk * kBlockKeys * kChunkBytes), kKeyTile);
    fence_products();
#pragma unroll
    for (int i = 0; i < kBlockKeys / 16; ++i)
      multiply_gradients(part, a + step_down_columns(i), b + step_down_columns(i), i > 0);
    commit_products();
  }

  void step(i32 number, bool last, Loader& loader, bool loads) {
    constexpr int row_parts = kBlockQueries / kPartRows, chunks = kHeadDim / kChunkColumns;
    const int half = half_of(number);
    const bool first = kDeterministic && is_first(args, facts.block, place);
    float* const sums = args.query_sums + query_block_number(args, facts.block, place.head, place.tile) * kSumsOfBlock +
                        static_cast<i32>(threadIdx.x) % kWarp * 4;
#pragma unroll
    for (int index = 0; index < row_parts * chunks; ++index) {
      const int row_part = index / chunks, chunk = index % chunks;
      SumsOfChunk part;
      begin_part(part, half, row_part, chunk);
      if (index == 0) {
        if (loads) loader.load_step();
        __syncwarp();
      }
      wait_products<0>();
      if (index == row_parts * chunks - 1 && threadIdx.x % kWarp == 0) arrive(shared.gradients_empty(half));
      pin(part);
      if (args.query_sums == nullptr) continue;
      if (kDeterministic && index == 0 && begins_group(facts.block, place)) wait_barrier(shared.turn_begun(), turn);
      send_sums(part, sums + sum_place(row_part * (kPartRows / 16) + warp, chunk * (kChunkColumns / 8), 0, 0), first,
                last);
    }
    if (kDeterministic && args.query_sums != nullptr && ends_group(facts.block, place)) {
      turn ^= 1;
      __syncwarp();
      if (threadIdx.x % kWarp == 0) arrive(shared.turn_done());
    }
    place.next(facts.block);
  }
};

inline void bring_and_sum(const BackwardSm90Args& args, const Facts& facts, const Shared& shared, int warp) {
  const i32 steps = step_count(args, facts.block);
  if (steps == 0) return;
  const bool loads = threadIdx.x == kLoader;
  Loader loader(args, facts.block, shared);
  if (loads) {
    loader.load_keys();
    wait_for_previous();  // which makes the rows' facts
    for (int stage = 0; stage < kStages; ++stage) loader.load_step();
  }
  __syncwarp();
  wait_for_previous();  // which clears the sums
  Summer summer{args, facts, shared, warp, first_place(args, facts.block)};
  wait_barrier(shared.keys_full(), 0);
  if (facts.clean_keys < kBlockKeys) {
    clear_rows<kKeyTile>(shared.keys(), facts.clean_keys, kBlockKeys);
    publish(kKeyWarpgroups);
  }
#pragma unroll 1
  for (i32 step = 0; step < steps; ++step) {
    wait_barrier(shared.gradients_full(half_of(step)), half_phase(step));
    summer.step(step, step == steps - 1, loader, step > 0 && loads);
  }
}

}  // namespace narrows
