// Shared memory of the sm90 backward kernel of wide heads: its tiles, and the barriers that hand them to and fro, within a
// thread block and between the two of a cluster.
#pragma once
#include "kernels/backward_steps_sm90.cuh"
#include "kernels/backward_tiles_sm90.cuh"
#include "kernels/ring.cuh"

namespace narrows {

static_assert(kCluster == 2 && kOwnKeys == kPartRows && kBlockQueries == kPartRows && kColumnWarps == 1);
// Warpgroups, by their number: one makes scores, two sum dK and dV, one sums dQ.
constexpr int kScorer = 0, kFirstKeySummer = 1, kKeySummers = 2, kQuerySummer = 3;
static_assert(kThreads == 4 * kWarpgroup && kOwnWarps == 4);

using OutputRing = RingOf<kOutputStages>;

constexpr SmemTile kOwnKeyTile{kOwnKeys, kHeadBytes}, kOwnValueTile{kOwnKeys, kValueBytes};
constexpr SmemTile kOwnScoreTile{kOwnKeys, kChunkBytes};  // P^T, dS^T
constexpr u32 kChunkOfTile = kOwnKeys * kChunkBytes;      // of any tile here: 64 rows
constexpr u32 kScoreBytes = kOwnScoreTile.bytes();

// Columns, in chunks of 64, are shared by two: warpgroups that sum dK and dV, thread blocks that sum dQ.
constexpr int kHeadChunks = kHeadDim / kChunkColumns, kValueChunks = kValueDim / kChunkColumns;
constexpr int chunks_of(int chunks, int half) { return half == 0 ? ceil_div(chunks, 2) : chunks / 2; }
constexpr int first_chunk(int chunks, int half) { return half == 0 ? 0 : ceil_div(chunks, 2); }
static_assert(kHeadChunks >= 2 && kValueChunks >= 2);

// In the order of addresses: K, V; of the other thread block's K the columns whose dQ is summed here; the stages of Q; those of
// dO; two of P^T; two of dS^T, and two of the other's; the stages of rows' facts; barriers; facts of the keys.
constexpr u32 kValuesAt = kOwnKeyTile.bytes(), kOtherKeysAt = kValuesAt + kOwnValueTile.bytes();
constexpr u32 kQueriesAt = kOtherKeysAt + chunks_of(kHeadChunks, 0) * kChunkOfTile;
constexpr u32 kOutputsAt = kQueriesAt + kStages * kQueryTile.bytes();
constexpr u32 kWeightsAt = kOutputsAt + kOutputStages * kOutputTile.bytes();
constexpr u32 kGradientsAt = kWeightsAt + 2 * kScoreBytes, kOtherGradientsAt = kGradientsAt + 2 * kScoreBytes;
constexpr u32 kRowFactsAt = kOtherGradientsAt + 2 * kScoreBytes, kBarriersAt = kRowFactsAt + kStages * kFactBytes;
constexpr u32 kFactsAt = kBarriersAt + 8 * 22;
static_assert(kFactsAt % 16 == 0 && kFactsAt + sizeof(Facts) <= kSharedBytes, "the planner's bytes are enough");
static_assert(kStages == 2 && kOutputStages <= 2, "barrier numbers leave room for no more");

// S: the warpgroup that makes scores, K: those that sum dK and dV, Q: the one that sums dQ. Each brings half of the rows of Q and
// dO to both thread blocks, so both must have a stage free.
//
// barrier            count    arrives                                            waits
// keys, values       1        the loader, with the bytes                         keys: S, Q; values: S
// queries, outputs   1        the same, of both loaders; facts come with Q       S, K
// queries_empty      8 + 8    a lane of each warp of K, here and there:          the loader
//                             dK of the step is done, S before it
// outputs_empty      12 + 12  the same, and of each warp of S: dV is done, dP    the loader
// weights_full       4        a lane of each warp of S                           K
// weights_empty      8        a lane of each warp of K                           S
// gradients_full     4        a lane of each warp of S                           K, Q
// others_full        1        a thread of Q, with the bytes that S there sends   Q
// gradients_empty    8+4+4    a lane of each warp of K, of Q, and of Q there,    S; behind the last step K
//                             to which this dS was sent
struct Shared {
  u32 base;

  u32 keys() const { return base; }
  u32 values() const { return base + kValuesAt; }
  u32 other_keys() const { return base + kOtherKeysAt; }
  u32 queries(int stage) const { return base + kQueriesAt + static_cast<u32>(stage * kQueryTile.bytes()); }
  u32 outputs(int stage) const { return base + kOutputsAt + static_cast<u32>(stage * kOutputTile.bytes()); }
  u32 weights(int half) const { return base + kWeightsAt + static_cast<u32>(half) * kScoreBytes; }
  u32 gradients(int half) const { return base + kGradientsAt + static_cast<u32>(half) * kScoreBytes; }
  u32 other_gradients(int half) const { return base + kOtherGradientsAt + static_cast<u32>(half) * kScoreBytes; }
  u32 facts(int stage) const { return base + kRowFactsAt + static_cast<u32>(stage) * kFactBytes; }

  u32 barrier(int number) const { return base + kBarriersAt + static_cast<u32>(8 * number); }
  u32 keys_full() const { return barrier(0); }
  u32 values_full() const { return barrier(1); }
  u32 queries_full(int stage) const { return barrier(2 + stage); }
  u32 queries_empty(int stage) const { return barrier(4 + stage); }
  u32 outputs_full(int stage) const { return barrier(6 + stage); }
  u32 outputs_empty(int stage) const { return barrier(8 + stage); }
  u32 weights_full(int half) const { return barrier(10 + half); }
  u32 weights_empty(int half) const { return barrier(12 + half); }
  u32 gradients_full(int half) const { return barrier(14 + half); }
  u32 others_full(int half) const { return barrier(16 + half); }
  u32 gradients_empty(int half) const { return barrier(18 + half); }
};

inline void init_barriers(const Shared& shared) {
  constexpr u32 key_warps = 4 * kKeySummers;
  init_barrier(shared.keys_full(), 1);
  init_barrier(shared.values_full(), 1);
  for (int stage = 0; stage < kStages; ++stage) {
    init_barrier(shared.queries_full(stage), 1);
    init_barrier(shared.queries_empty(stage), kCluster * key_warps);
  }
  for (int stage = 0; stage < kOutputStages; ++stage) {
    init_barrier(shared.outputs_full(stage), 1);
    init_barrier(shared.outputs_empty(stage), kCluster * (key_warps + 4));
  }
  for (int half = 0; half < 2; ++half) {
    init_barrier(shared.weights_full(half), 4);
    init_barrier(shared.weights_empty(half), key_warps);
    init_barrier(shared.gradients_full(half), 4);
    init_barrier(shared.others_full(half), 1);
    init_barrier(shared.gradients_empty(half), key_warps + 4 * kCluster);
  }
  fence_barrier_init();
}

// What every warp of the kernel has: whose keys, and where things lie here and in the other thread block.
struct Role {
  const BackwardSm90Args& args;
  Facts& facts;
  Shared shared, other;
  int rank;        // of the thread block in its cluster
  int warp, lane;  // warp within its warpgroup

  // The first of the thread block's own keys, of the block's.
  int first_own() const { return rank * kOwnKeys; }
  // A lane of the warp tells both thread blocks.
  template <u32 (Shared::*barrier)(int) const> void release(int number) const {
    if (lane != 0) return;
    arrive((shared.*barrier)(number));
    arrive_there((other.*barrier)(number));
  }
};

}  // namespace narrows
