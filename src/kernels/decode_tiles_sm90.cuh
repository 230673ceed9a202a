// Shared memory of the sm90 decode kernel, and what a warpgroup of it holds: of 64 packed rows the scores of a tile of keys, and
// half of the columns of O.
#pragma once
#include "kernels/decode_facts.cuh"
#include "kernels/descriptor.cuh"
#include "kernels/ptx_sm90.cuh"
#include "kernels/ring.cuh"

namespace narrows {

// Two warpgroups; the other warps bring K and V.
constexpr int kComputeWarps = 8, kComputeThreads = kComputeWarps * kWarp;
constexpr int kBringWarps = kWarps - kComputeWarps;
constexpr int kSliceColumns = kValueDim / 2;  // of O, that a warpgroup has
static_assert(kBlockQueries == 64 && kBlockKeys == 64, "rows of a wgmma, and one chunk of weights");

// Of a thread: everybody's, and what the roles make of them while there are tiles.
constexpr int kRegisters = 168, kComputeRegisters = 216, kBringRegisters = 72;

constexpr int kRows = 2;  // of packed rows, that a lane holds a quarter of the scores of
constexpr int kKeyTiles = kBlockKeys / 8, kValueTiles = kSliceColumns / 8, kColumns = kValueDim;
using Scores = float[1][kKeyTiles][4];
using Outputs = float[1][kValueTiles][4];

struct DecodeLane {
  int lane = static_cast<int>(threadIdx.x % kWarp), warp = static_cast<int>(threadIdx.x % kWarpgroup) / kWarp;
  int g = lane / 4, c = lane % 4;

  int row(int r) const { return 16 * warp + 8 * r + g; }  // packed, of the r-th quarter of scores
};

// A stage has a tile of K or, where V is not a part of K, one of V.
constexpr SmemTile kQueryTile = chunked(kBlockQueries, kHeadDim);
constexpr SmemTile kStageTile = chunked(kBlockKeys, max_of(kHeadDim, kValueDim));
constexpr SmemTile kWeightTile = chunked(kBlockQueries, kBlockKeys);
constexpr u32 kStagesAt = static_cast<u32>(kQueryTile.bytes());
constexpr u32 kWeightsAt = kStagesAt + static_cast<u32>(kStages * kStageTile.bytes());

// In place of stages and weights once they are used.
constexpr int kOutputStride = kColumns + 8;  // floats; a quarter of a warp's lanes writes to different banks
static_assert(kBlockQueries * kOutputStride * 4 <= kStages * kStageTile.bytes() + kWeightTile.bytes());
static_assert(kThreads * kLineSequenceBytes <= kStages * kStageTile.bytes());

// Beside the tiles.
struct Beside {
  Facts facts;
  LineState line;
  RowSum sums[kBlockQueries];
  float factors[kBlockQueries];  // of what was accumulated before, with the weights
  bool broken;                   // an entry of the table was no page
  bool last;                     // of the blocks that have a part of the rows
};
constexpr u32 kBarriersAt = kWeightsAt + static_cast<u32>(kWeightTile.bytes()), kBesideAt = kBarriersAt + 16 * kStages;
static_assert(kBesideAt + sizeof(Beside) <= kSharedBytes, "the planner's bytes are enough");

// barrier   count                       arrives                               waits
// full      a thread that brings        each when its copies have landed      all threads that compute
// empty     a warp that computes        a lane of each                        all threads that bring
struct Tiles {
  u32 base;  // shared address
  Beside& beside;

  u32 stage(const Ring& at) const { return base + kStagesAt + static_cast<u32>(at.stage * kStageTile.bytes()); }
  u32 weights() const { return base + kWeightsAt; }
  u32 full(const Ring& at) const { return base + kBarriersAt + static_cast<u32>(8 * at.stage); }
  u32 empty(const Ring& at) const { return full(at) + 8 * kStages; }

  void init_barriers() const {
    for (Ring at; at.phase == 0; at.next()) {
      init_barrier(full(at), kBringWarps * kWarp);
      init_barrier(empty(at), kComputeWarps);
    }
    fence_barrier_init();
  }
};

}  // namespace narrows
