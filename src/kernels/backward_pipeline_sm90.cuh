// Shared memory of the sm90 backward kernel: its tiles, and the barriers that hand them to and fro.
#pragma once
#include "kernels/backward_steps_sm90.cuh"
#include "kernels/ring.cuh"

namespace narrows {

constexpr int kKeyWarpgroups = kBlockKeys / kPartRows;
constexpr int kTurnWarpgroups = kDeterministic ? 1 : 0;  // of which two threads take and pass turns
static_assert(kThreads == kWarpgroup * (kKeyWarpgroups + 1 + kTurnWarpgroups));
static_assert(kWarps == 4 * kKeyWarpgroups && kColumnWarps == 1 && kCluster == 1);
static_assert(kBlockQueries % kPartRows == 0);

// In the order of addresses: K, V; the stages of Q; those of dO; two of dS^T; the stages of rows' facts; barriers; facts of the keys.
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

// Named barriers: 1 + its number of a warpgroup, one of all warps of keys, and kTurn + w passes the turn to warpgroup w of keys.
constexpr int kAllOfKeys = kKeyWarpgroups + 2, kTurn = kAllOfKeys + 1, kTwoWarpgroups = 2 * kWarpgroup;
static_assert(!kTakesTurns || kKeyWarpgroups == 2);

static_assert(kFactsAt + sizeof(Facts) <= kSharedBytes, "the planner's bytes are enough");

}  // namespace narrows
