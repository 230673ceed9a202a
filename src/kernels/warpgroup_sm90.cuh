// What a warpgroup of the sm90 forward kernel has and does below the softmax: its place in the rings of stages, its
// turns at the tensor cores, and the products S = Q K^T and O += P V, begun in one place and ended in another.
#pragma once
#include "kernels/copy_tile.cuh"
#include "kernels/pipeline_sm90.cuh"
#include "kernels/softmax.cuh"

namespace narrows {

// Named barriers: 1 + w passes the tensor cores to warpgroup w, 1 + kWarpgroups + w is warpgroup w's own.
constexpr int kTurn = 1, kOwn = 1 + kWarpgroups, kTwoWarpgroups = 2 * kWarpgroup;

// A tile's registers, one thread's part. Arrays alone, and no array elsewhere: one beside scalars that live through the
// loop keeps these in memory until the loops are unrolled, and the code differs.
struct Fragments {
  Outputs o;
  Scores s;                   // then weights
  u32 p[kBlockKeys / 16][4];  // weights as the first operand
  float factor[kRows], subtrahend[kRows];
  Softmax softmax;
};

using QueryFragments = u32[kHeadDim / 16][4];

struct Warpgroup {
  QueryRing q;
  Ring k, v;
  Shared shared;
  const ForwardSm90Args& args;
  char* memory;               // shared
  int warpgroup, warp, lane;  // warp within its warpgroup
  QueryFragments& fragments;  // of Q, when kQueriesInRegisters

  // What each row of the tile sees; a warp's own are its own.
  Keys* rows() const { return reinterpret_cast<Keys*>(memory + kRowsAt); }
  // The warp's note of the tile that it ends.
  QueryBlock* ending() const { return reinterpret_cast<QueryBlock*>(memory + kBlocksAt) + 4 * warpgroup + warp; }
  bool leads() const { return warp == 0 && lane == 0; }
  // After all lanes have seen the barrier's phase that made it full: a later one of the same parity would not let them
  // by.
  void release(u32 barrier) const {
    if (lane == 0) arrive(barrier);
  }
  // This lane's row of the 8x8 matrices at units 0 and 1 of the warp's 16 rows, to go on from. The lane is read anew,
  // or the compiler makes addresses of it before the loop over tiles and keeps them in local memory.
  template <SmemTile tile> UnitAddress<tile> matrix_row(u32 part) const {
    const i32 own = lane_index();
    return {part, 16 * warp + own % 16, own / 16};
  }

  // The tile's Q, where the products take it from.
  void take_queries() {
    wait_barrier(shared.query_full(warpgroup, q), q.phase);
    if constexpr (kQueriesInRegisters) {
      const auto row = matrix_row<kQueryPart>(shared.query_part(warpgroup, q));
#pragma unroll
      for (int i = 0; i < kHeadDim / 16; ++i) load_matrices(row.at(2 * i, 0), fragments[i]);
      __syncwarp();
      drop_queries();
    }
  }
  // Its place is free, if O does not leave through it.
  void drop_queries() {
    if constexpr (kOwnOutputTile) {
      release(shared.query_empty(warpgroup, q));
      q.next();
    }
  }

  void wait_keys() const {
    wait_barrier(shared.keys().full_barrier(k), k.phase);
    if constexpr (kGathers) fence_async_shared();
  }
  void wait_values() const {
    wait_barrier(shared.values().full_barrier(v), v.phase);
    if constexpr (kGathers) fence_async_shared();
  }

  // S = Q K^T: begun here, there after a wait.
  void begin_scores(Scores& s) const {
    const u64 b = descriptor_along_rows(shared.keys().tile(k));
    if constexpr (kQueriesInRegisters) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 16; ++i)
        multiply_scores(s, fragments[i], b + step_along_rows(kKeyStage, i), i > 0);
    } else {
      const u64 a = descriptor_along_rows(shared.query_part(warpgroup, q));
#pragma unroll
      for (int i = 0; i < kHeadDim / 16; ++i)
        multiply_scores(s, a + step_along_rows(kQueryPart, i), b + step_along_rows(kKeyStage, i), i > 0);
    }
    commit_products();
  }
  // more: of this tile.
  void end_scores(Scores& s, bool more) {
    pin(s);
    release(shared.keys().empty_barrier(k));
    k.next();
    if (!kQueriesInRegisters && !more) drop_queries();
  }

  // O += P V, or O = P V at a tile's first block: begun here, there when nothing is in flight.
  void begin_output(Fragments& f, bool adds) const {
    const u64 b = descriptor_down_columns(shared.values().tile(v), kValueStage);
#pragma unroll
    for (int i = 0; i < kBlockKeys / 16; ++i) multiply_output(f.o, f.p[i], b + step_down_columns(i), i > 0 || adds);
    commit_products();
  }
  // in_flight: groups of products that were begun after it.
  template <int in_flight = 0> void end_output(Fragments& f) {
    wait_products<in_flight>();
    pin(f.o);
    release(shared.values().empty_barrier(v));
    v.next();
  }

  static void pack_weights(Fragments& f) {
#pragma unroll
    for (int i = 0; i < kBlockKeys / 16; ++i)
#pragma unroll
      for (int n = 0; n < 4; ++n)
        f.p[i][n] = pack(f.s[0][2 * i + n / 2][n % 2 * 2], f.s[0][2 * i + n / 2][n % 2 * 2 + 1]);
  }

  // Blocks of keys that this warpgroup leaves out are passed over all the same, and turns with them.
  Keys blocks_of(const TileFacts& facts) const { return kLimitsKeys ? facts.own[warpgroup] : facts.blocks; }
  i32 skipped(const TileFacts& facts) const { return kLimitsKeys ? facts.blocks.end - blocks_of(facts).end : 0; }
  bool has_one(const TileFacts& facts) const { return blocks_of(facts).begin + 1 == blocks_of(facts).end; }
  bool skips_first(const TileFacts& facts) const { return kLimitsKeys && facts.blocks.begin < blocks_of(facts).begin; }
  void skip_keys() {
    wait_keys();
    __syncwarp();
    release(shared.keys().empty_barrier(k));
    k.next();
  }
  void pass_keys(const TileFacts& facts) {
#pragma unroll 1
    for (i32 left = skipped(facts); left > 0; --left) skip_keys();
  }
  void skip_values() {
    wait_values();
    __syncwarp();
    release(shared.values().empty_barrier(v));
    v.next();
  }
  // Warpgroups have the tensor cores one after the other, or each when it is ready.
  void take_turn() const {
    if constexpr (kTakesTurns) meet(kTurn + warpgroup, kTwoWarpgroups);
  }
  void pass_turn() const {
    if constexpr (kTakesTurns) pass(kTurn + (warpgroup + 1) % kWarpgroups, kTwoWarpgroups);
  }
  void skip_turn() const {
    take_turn();
    pass_turn();
  }
};

}  // namespace narrows
