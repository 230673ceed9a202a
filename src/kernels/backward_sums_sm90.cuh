// The warpgroup of the sm90 backward kernel that brings the tiles of the others, and sums dQ.
#pragma once
#include "kernels/backward_pipeline_sm90.cuh"
#include "kernels/copy_tile.cuh"

namespace narrows {

// ------------------------------------------------------------------------------------------------------------------ bring

constexpr u32 kLoader = kKeyWarpgroups * kWarpgroup;  // the thread

// A tile, in boxes of 64 columns.
template <SmemTile tile> inline void load_tile(u32 to, const TensorMap& map, u32 barrier, BoxPlace from, u64 hint) {
  for (int chunk = 0; chunk < tile.row_bytes / kChunkBytes; ++chunk, from.column += kChunkColumns)
    load_box(to + static_cast<u32>(chunk * tile.rows * kChunkBytes), map, barrier, from, hint);
}

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

// Zeros in rows [begin, end) of a tile, by the threads of a warpgroup.
template <SmemTile tile> inline void clear_rows(u32 to, i32 begin, i32 end) {
  constexpr int units = tile.row_bytes / kUnitBytes;
  for (i32 index = begin * units + static_cast<i32>(thread_index()) % kWarpgroup; index < end * units;
       index += kWarpgroup)
    store_shared128(to + tile.offset(index / units, index % units), {0, 0, 0, 0});
}

// What shows the engine and the tensor cores, to all of a warpgroup, what its threads wrote.
inline void publish(int warpgroup) {
  fence_async_shared();
  meet(1 + warpgroup, kWarpgroup);
}

// --------------------------------------------------------------------------------------------------------------------- dQ

// Deterministic: key blocks add to some query blocks, a group, in their order. Two threads of a warpgroup of their own take and pass the
// turns, so that neither the wait for what was added nor the way of the numbers holds up the products, nor the one the other.
constexpr i32 kGroup = max_of(kTurnRows / kBlockQueries, 1);  // query blocks

struct Turns {
  const BackwardSm90Args& args;
  const KeyBlock& block;
  Shared shared;

  // visit(where a group's number stands, the block's own, which of its turns it is)
  template <class Visit> void each_turn(const Visit& visit) const {
    if (args.query_sums == nullptr || step_count(args, block) == 0) return;
    const i32 own = block.first / kBlockKeys;
    u32 turn = 0;
    for (i32 head = block.kv_head * args.group; head < (block.kv_head + 1) * args.group; ++head)
      for (i32 first = block.begin_tile / kGroup * kGroup; first < block.end_tile; first += kGroup, ++turn)
        visit(args.turns + query_block_number(args, block, head, first) * kWarps,
              static_cast<u32>(kLastKeysFirst ? last_key_block(args, block, first, kGroup) - own
                                              : own - first_key_block(args, block, first, kGroup)),
              turn);
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

  bool begins_group() const { return place.tile % kGroup == 0 || place.tile == facts.block.begin_tile; }
  bool ends_group() const { return place.tile % kGroup == kGroup - 1 || place.tile == facts.block.end_tile - 1; }

  // Whether nobody has added to the step's sums before.
  bool is_first() const {
    const KeyBlock& block = facts.block;
    const i32 own = block.first / kBlockKeys;
    if constexpr (!kLimitsKeys) return own == 0;
    return own ==
           (kLastKeysFirst ? last_key_block(args, block, place.tile, 1) : first_key_block(args, block, place.tile, 1));
  }

  // 64 query rows and 64 columns of dS K.
  using Part = float[1][kChunkColumns / 8][4];
  void begin_part(Part& part, int half, int row_part, int chunk) const {
    const u64 a = descriptor_along_rows(shared.gradients(half) + static_cast<u32>(row_part * kBlockKeys * kChunkBytes));
    const u64 b = descriptor_down_columns(shared.keys() + static_cast<u32>(chunk * kBlockKeys * kChunkBytes), kKeyTile);
    fence_products();
#pragma unroll
    for (int i = 0; i < kBlockKeys / 16; ++i)
      multiply_gradients(part, a + step_down_columns(i), b + step_down_columns(i), i > 0);
    commit_products();
  }

  // A burst would hold up what the other warps have in shared memory: one sum of four goes each kPace clocks.
  // first: to sums that hold nothing yet.
  void send(const Part& part, float* to, bool first, bool last) const {
    const u32 start =
        clock() - (last ? kPace * kChunkColumns / 8 : 0);  // behind the last step the others wait for this
#pragma unroll
    for (int j = 0; j < kChunkColumns / 8; ++j) {
      while (clock() - start < static_cast<u32>(j * kPace)) {
      }
      float* const four = to + j * 4 * kWarp;
      const float(&x)[4] = part[0][j];
      if (kDeterministic && first)
        store_global4(four, {x[0], x[1], x[2], x[3]});
      else
        add_global4(four, x);
    }
  }

  void step(i32 number, bool last, Loader& loader, bool loads) {
    constexpr int row_parts = kBlockQueries / kPartRows, chunks = kHeadDim / kChunkColumns;
    const int half = half_of(number);
    const bool first = kDeterministic && is_first();
    float* const sums = args.query_sums + query_block_number(args, facts.block, place.head, place.tile) * kSumsOfBlock +
                        static_cast<i32>(threadIdx.x) % kWarp * 4;
#pragma unroll
    for (int index = 0; index < row_parts * chunks; ++index) {
      const int row_part = index / chunks, chunk = index % chunks;
      Part part;
      begin_part(part, half, row_part, chunk);
      if (index == 0) {
        if (loads) loader.load_step();
        __syncwarp();
      }
      wait_products<0>();
      if (index == row_parts * chunks - 1 && threadIdx.x % kWarp == 0) arrive(shared.gradients_empty(half));
      pin(part);
      if (args.query_sums == nullptr) continue;
      if (kDeterministic && index == 0 && begins_group()) wait_barrier(shared.turn_begun(), turn);
      send(part, sums + sum_place(row_part * (kPartRows / 16) + warp, chunk * (kChunkColumns / 8), 0, 0), first, last);
    }
    if (kDeterministic && args.query_sums != nullptr && ends_group()) {
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
