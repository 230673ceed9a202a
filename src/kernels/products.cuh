// The two matrix products of a warp: S = Q K^T and O += P V, on tiles in shared memory.
//
// Accumulator 2h + e of a 16x8 tile is row lane / 4 + 8h, column 2 (lane % 4) + e. Four lanes, a quad, share a row.
// 16-bit: mma.m16n8k16. fp32: three mma.m16n8k8 on the upper and lower halves of the operands, which are added up from 0 and
// then to the sum in fp32: the tensor core's own accumulation drops bits, and chained over k it is 6 to 22 times worse.
#pragma once
#include "kernels/elements.cuh"
#include "kernels/smem_tile.cuh"

namespace narrows {

constexpr int kRowTiles = kBlockQueries / kWarps / 16;                  // 16-row tiles of a warp
constexpr int kKeyTiles = kBlockKeys / 8, kValueTiles = kValueDim / 8;  // 8-column tiles
constexpr int kWarpRows = 16 * kRowTiles;
constexpr int kHeadBytes = kHeadDim * kElementBytes, kValueBytes = kValueDim * kElementBytes;  // of a row

constexpr SmemTile kQueryTile{kBlockQueries, kHeadBytes}, kKeyTile{kBlockKeys, kHeadBytes},
    kValueTile{kBlockKeys, kValueBytes};

using Scores = float[kRowTiles][kKeyTiles][4];
using Outputs = float[kRowTiles][kValueTiles][4];

inline void mma16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (kElement == Element::fp16)
    mma_fp16(d, a, b0, b1);
  else
    mma_bf16(d, a, b0, b1);
}

// fp32 operands as sums of two tf32, of which the tensor core reads the upper 19 bits. high is rounded, so that low is at most
// 2^-11 of it and the product of two lows may be left out. A NaN may leave high, but not low.
template <int n> struct Halves {
  u32 high[n], low[n];
  Halves(const u32 (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      high[i] = (x[i] + 0x1000u) & 0xffffe000u;
      low[i] = as_bits(as_float(x[i]) - as_float(high[i]));
    }
  }
};

inline void mma32(float (&d)[4], const Halves<4>& a, const Halves<2>& b) {
  float sum[4] = {};
  mma_tf32(sum, a.low, b.high[0], b.high[1]);
  mma_tf32(sum, a.high, b.low[0], b.low[1]);
  mma_tf32(sum, a.high, b.high[0], b.high[1]);
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = __fadd_rn(d[i], sum[i]);
}

// One step of 32 bytes along the head dim: both operands' rows hold it in two units.
inline void score_step(Scores& s, const u32 (&q)[kRowTiles][4], const u32 (&k)[4], int pair) {
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if constexpr (kElement == Element::fp32)
        mma32(s[t][2 * pair + n], Halves<4>(q[t]), Halves<2>({k[2 * n], k[2 * n + 1]}));
      else
        mma16(s[t][2 * pair + n], q[t], k[2 * n], k[2 * n + 1]);
    }
}

// s = q k^T for the warp's rows, which begin at `row` of the query tile.
inline void multiply_keys(Scores& s, u32 queries, int row, u32 keys) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const UnitAddress<kQueryTile> q(queries, row + lane % 16, lane / 16);
  const UnitAddress<kKeyTile> k(keys, lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[t][j][i] = 0.f;
#pragma unroll kElement == Element::fp32 ? 2 : kHeadBytes
  for (int unit = 0; unit < kHeadBytes / kUnitBytes; unit += 2) {
    u32 a[kRowTiles][4];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) load_matrices(q.at(unit, 16 * t), a[t]);
#pragma unroll
    for (int pair = 0; pair < kKeyTiles / 2; ++pair) {
      u32 b[4];
      load_matrices(k.at(unit, 16 * pair), b);
      score_step(s, a, b, pair);
    }
  }
}

// o += p v, 16-bit: two tiles of p are one operand, as they lie.
inline void multiply_values16(Outputs& o, const Scores& p, u32 values) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const UnitAddress<kValueTile> v(values, lane % 16, lane / 16);
#pragma unroll
  for (int step = 0; step < kKeyTiles / 2; ++step) {
    u32 a[kRowTiles][4];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[t][i] = pack(p[t][2 * step + i / 2][i % 2 * 2], p[t][2 * step + i / 2][i % 2 * 2 + 1]);
#pragma unroll
    for (int pair = 0; pair < kValueTiles / 2; ++pair) {
      u32 b[4];
      load_matrices_transposed(v.at(2 * pair, 16 * step), b);
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
        for (int n = 0; n < 2; ++n) mma16(o[t][2 * pair + n], a[t], b[2 * n], b[2 * n + 1]);
    }
  }
}

// o += p v, fp32. The order of a sum's terms is free: k index c of the product is key 2c, c + 4 key 2c + 1, so that p is an
// operand as it lies; the two keys' rows are read where they are.
inline void multiply_values32(Outputs& o, const Scores& p, u32 values) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const u32 start = values + static_cast<u32>(lane / 4 % 4 * 4);
  const UnitAddress<kValueTile> even(start, lane % 4 * 2, lane / 16), odd(start, lane % 4 * 2 + 1, lane / 16);
#pragma unroll
  for (int step = 0; step < kKeyTiles; ++step) {
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n) {
      const Halves<2> b({load_shared(even.at(2 * n, 8 * step)), load_shared(odd.at(2 * n, 8 * step))});
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        const float(&x)[4] = p[t][step];
        mma32(o[t][n], Halves<4>({as_bits(x[0]), as_bits(x[2]), as_bits(x[1]), as_bits(x[3])}), b);
      }
    }
  }
}

inline void multiply_values(Outputs& o, const Scores& p, u32 values) {
  if constexpr (kElement == Element::fp32)
    multiply_values32(o, p, values);
  else
    multiply_values16(o, p, values);
}

}  // namespace narrows
