// O = softmax(scale * Q K^T) V and its LSE for few query rows of up to 576 columns on Hopper, as decode_sm80.cu, for heads so wide
// that a warp's own keys would be read again for every few rows (MLA: one kv head, V the first columns of K).
//
// A thread block has 64 packed rows and takes a tile of 64 keys into shared memory once. The first warpgroup makes S = Q K^T and
// the weights, which go through shared memory; both add P V to half of O's columns each: 64 rows x 512 columns of fp32 are half of
// a multiprocessor's registers. Four warps bring tiles, and where V is a part of K's memory a tile serves as both.
#include "kernels/decode_bring_sm90.cuh"
#include "kernels/decode_join_sm90.cuh"
#include "kernels/decode_scores.cuh"

namespace narrows {

// Named barriers of the threads that compute.
constexpr int kTogether = 1, kWeightsReady = 2, kWeightsTaken = 3;

struct Computer {
  const Block& block;
  const Tiles& tiles;
  Ring& ring;
  bool shares;  // V is a part of K
  DecodeLane at;

  void wait_tile() const {
    wait_barrier(tiles.full(ring), ring.phase);
    fence_async_shared();
  }
  void release_tile() const {
    if (at.lane == 0) arrive(tiles.empty(ring));
    ring.next();
  }

  void multiply_keys(Scores& s) const {
    const u64 a = descriptor_along_rows(tiles.base), b = descriptor_along_rows(tiles.stage(ring));
    pin(s);
    fence_products();
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i)
      multiply_scores(s, a + step_along_rows(kQueryTile, i), b + step_along_rows(kStageTile, i), i > 0);
    commit_products();
    wait_products<0>();
    pin(s);
  }

  // Waits for V, unless it was waited for as K, and gives its stage back.
  void multiply_values(Outputs& o, const u32 (&p)[kBlockKeys / 16][4], int slice) const {
    constexpr int kSliceChunks = kSliceColumns / kChunkColumns;
    const u32 first = tiles.stage(ring) + static_cast<u32>(slice * kSliceChunks * kBlockKeys * kChunkBytes);
    const u64 b = descriptor_down_columns(first, kStageTile);
    pin(o);
    fence_products();
#pragma unroll
    for (int i = 0; i < kBlockKeys / 16; ++i) multiply_output(o, p[i], b + step_down_columns(i), 1);
    commit_products();
    wait_products<0>();
    pin(o);
    release_tile();
  }

  // This lane's row of the 8x8 matrices at units `unit` and `unit + 1` of the warp's 16 rows of weights.
  u32 weights_row(int unit) const {
    return tiles.weights() + kWeightTile.offset(16 * at.warp + at.lane % 16, unit + at.lane / 16);
  }

  void rescale(Outputs& o, const float (&factor)[kRows]) const {
    if (__any_sync(~0u, factor[0] != 1.f || factor[1] != 1.f)) scale_rows(o, factor);
  }

  void weigh_tile(Scores& s, Softmax& softmax, float (&factor)[kRows], const RuledRows& ruled,
                  const DropoutRule& dropout, const ScoreTile& given, i32 tile) const {
    const Keys& common = block.facts.common;
    const i32 first = tile * kTileKeys;
    if constexpr (kNatural) make_logits(s, block, ruled, given, tile);
    if (first < common.begin || common.end < first + kTileKeys) hide_unseen(s, block.facts, tile);
    if constexpr (kMask) hide_masked(s, given, tile);
    float subtrahend[kRows];
    raise_reference(softmax, s, factor, subtrahend, block.args.units);
    weigh(softmax, s, subtrahend, block.args.units);
    if constexpr (kDropout) drop(s, dropout, block, ruled, tile);
  }

  // To the other warpgroup, once it has taken the ones before.
  void pass_weights(const u32 (&p)[kBlockKeys / 16][4], const float (&factor)[kRows]) const {
    meet(kWeightsTaken, kComputeThreads);
#pragma unroll
    for (int i = 0; i < kBlockKeys / 16; ++i) store_matrices(weights_row(2 * i), p[i][0], p[i][1], p[i][2], p[i][3]);
    if (at.c == 0)
#pragma unroll
      for (int r = 0; r < kRows; ++r) tiles.beside.factors[at.row(r)] = factor[r];
    pass(kWeightsReady, kComputeThreads);
  }

  // The first warpgroup.
  void lead(Softmax& softmax, Outputs& o) const {
    const RuledRows ruled(block);
    const DropoutRule dropout = kDropout ? dropout_rule(block.args) : DropoutRule{};
#pragma unroll 1
    for (i32 tile = block.facts.first_tile; tile < block.facts.end_tile; ++tile) {
      const ScoreTile given(block, ruled, tile);
      Scores s;
      wait_tile();
      multiply_keys(s);
      if (!shares) release_tile();
      float factor[kRows];
      weigh_tile(s, softmax, factor, ruled, dropout, given, tile);
      u32 p[kBlockKeys / 16][4];
#pragma unroll
      for (int i = 0; i < kBlockKeys / 16; ++i)
#pragma unroll
        for (int n = 0; n < 4; ++n) p[i][n] = pack(s[0][2 * i + n / 2][n % 2 * 2], s[0][2 * i + n / 2][n % 2 * 2 + 1]);
      pass_weights(p, factor);
      rescale(o, factor);
      if (!shares) wait_tile();
      multiply_values(o, p, 0);
    }
  }

  // The second.
  void follow(Outputs& o) const {
#pragma unroll 1
    for (i32 tile = block.facts.first_tile; tile < block.facts.end_tile; ++tile) {
      meet(kWeightsReady, kComputeThreads);
      u32 p[kBlockKeys / 16][4];
      float factor[kRows];
#pragma unroll
      for (int i = 0; i < kBlockKeys / 16; ++i) load_matrices(weights_row(2 * i), p[i]);
#pragma unroll
      for (int r = 0; r < kRows; ++r) factor[r] = tiles.beside.factors[at.row(r)];
      pass(kWeightsTaken, kComputeThreads);
      rescale(o, factor);
      if (!shares) release_tile();
      wait_tile();
      multiply_values(o, p, 1);
    }
  }

  void keep_part(const Softmax& softmax, const Outputs& o, int slice) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const float sum = quad_sum(softmax.sum[r]);
      if (slice == 0 && at.c == 0) block.sums[at.row(r)] = {softmax.maximum[r], sum};
      float* const to = block.outputs + at.row(r) * kOutputStride + slice * kSliceColumns + 2 * at.c;
#pragma unroll
      for (int j = 0; j < kValueTiles; ++j)
        *reinterpret_cast<float2*>(to + 8 * j) = float2{o[0][j][2 * r], o[0][j][2 * r + 1]};
    }
  }
};

inline void compute(const Block& block, const Tiles& tiles, Ring& ring, bool shares, int slice) {
  const Computer computer{block, tiles, ring, shares, {}};
  Softmax softmax;
  Outputs o;
#pragma unroll
  for (int j = 0; j < kValueTiles; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) o[0][j][i] = 0.f;
  load_queries(block, tiles.base);
  meet(kTogether, kComputeThreads);
  if (slice == 0)
    computer.lead(softmax, o);
  else
    computer.follow(o);
  meet(kTogether, kComputeThreads);  // all tiles are used
  computer.keep_part(softmax, o, slice);
}

inline void work_on(const Block& block, const Tiles& tiles, Ring& ring) {
  const int warp = static_cast<int>(__shfl_sync(~0u, threadIdx.x / u32{kWarp}, 0));  // uniform, also for the compiler
  const TensorArg &k = block.args.k, &v = block.args.v;
  bool shares = k.data == v.data && block.args.value_dim <= block.args.head_dim;
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) shares &= k.strides[axis] == v.strides[axis];
  if (warp < kComputeWarps) {
    grow_registers<kComputeRegisters>();
    compute(block, tiles, ring, shares, warp / (kComputeWarps / 2));
    shrink_registers<kRegisters>();
  } else {
    shrink_registers<kBringRegisters>();
    bring(block, tiles, ring, shares, warp - kComputeWarps);
    if (block.facts.slots.count > 1 && threadIdx.x == kComputeThreads) tiles.beside.last = comes_last(block);
    grow_registers<kRegisters>();
  }
  let_next_begin();
  __syncthreads();
  if (tiles.beside.broken) {
    break_rows(block);
    __syncthreads();
  }
  if (block.facts.slots.count == 1)
    store_rows(block);
  else
    join(block, tiles.beside.last);
}

}  // namespace narrows

extern "C" __global__ void __launch_bounds__(narrows::kThreads, 1)
    decode_sm90(const __grid_constant__ narrows::DecodeArgs args) {
  using namespace narrows;
  extern __shared__ __align__(kTileAlignment) char memory[];
  Beside& beside = *reinterpret_cast<Beside*>(memory + kBesideAt);
  Facts& facts = beside.facts;
  const Tiles tiles{shared_address(memory), beside};
  const Block block{args, facts, memory, reinterpret_cast<float*>(memory + kStagesAt), beside.sums};
  if (threadIdx.x == 0) {
    if (tiles.base % kTileAlignment != 0) __trap();
    tiles.init_barriers();
  }
  // Where kernels overlap, the plan of a plain call comes before the wait for the one ahead: 2 to 7% of a call (MLA, H200).
  bool ahead = kOverlaps && args.plain_filled >= 0 && args.batch <= kThreads && args.refused == nullptr;
  if (!ahead) wait_for_previous();
  if (threadIdx.x / kWarpgroup == 1) pass(kWeightsTaken, kComputeThreads);  // there are none yet
  Ring ring;
  Line line(args, beside.line, reinterpret_cast<LineSequence*>(memory + kStagesAt), ahead);
  line.begin();
  for (;;) {
    if (threadIdx.x == 0) beside.broken = false;
    line.next(facts, [&](bool other_rows) {
      if (other_rows) gather_rows(args, facts);
      if (threadIdx.x == 0) gather_tiles(args, facts);
    });
    if (ahead) {
      wait_for_previous();
      ahead = false;
      if (!line.stands()) {
        line.begin();
        continue;
      }
    }
    if (facts.kv_head < 0) return;
    if (facts.begin >= facts.end) continue;
    work_on(block, tiles, ring);
    __syncthreads();
    line.look_again();
  }
}
