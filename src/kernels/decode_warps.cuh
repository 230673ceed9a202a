// Joining what the warps of the sm80 decode kernel have of the same packed rows.
#pragma once
#include "kernels/decode_block.cuh"
#include "kernels/decode_results.cuh"

namespace narrows {

// A warp's part of the packed rows, to shared memory.
inline void keep_part(const Block& block, const Softmax& softmax, const Outputs& o) {
  const DecodeLane at;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float sum = quad_sum(softmax.sum[r]);
    if (at.c == 0) block.sums[warp * kBlockQueries + 8 * r + at.g] = {softmax.maximum[r], sum};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (8 * r + 2 * at.c + e >= block.facts.packed_rows) continue;
#pragma unroll
      for (int i = 0; i < kValueSteps; ++i) {
        float* to = block.outputs + (warp * kBlockQueries + 8 * r + 2 * at.c + e) * kOutputStride + kStepColumns * i +
                    2 * kStepTiles * at.g;
#pragma unroll
        for (int j = 0; j < kStepTiles; j += 2)
          *reinterpret_cast<float4*>(to + 2 * j) =
              float4{o[r][i][j][e], o[r][i][j][2 + e], o[r][i][j + 1][e], o[r][i][j + 1][2 + e]};
      }
    }
  }
}

// The warps' sums, between barriers: each becomes the factor of the warp's part and that part's weights relative to the row's
// maximum, which follows the warps'.
inline void weigh_warps(const Block& block) {
  const int r = static_cast<int>(threadIdx.x) % kBlockQueries, warp = static_cast<int>(threadIdx.x) / kBlockQueries;
  RowSum* const column = block.sums + r;
  float most = kHidden;
  RowSum own{};
  if (warp < kWarps) {
    own = column[warp * kBlockQueries];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) most = fmaxf(most, column[w * kBlockQueries].maximum);
  }
  __syncthreads();
  if (warp < kWarps) {
    const float factor = factor_between(block.args.units, own.maximum, most);
    column[warp * kBlockQueries] = {factor, factor * own.sum};
    if (warp == 0) column[kWarps * kBlockQueries].maximum = most;
  }
  __syncthreads();
}

// Four columns of packed row r.
inline JoinedColumns join_warps(const Block& block, int r, int column) {
  JoinedColumns joined{{block.sums[kWarps * kBlockQueries + r].maximum, 0.f}, {0, 0, 0, 0}};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const RowSum weight = block.sums[w * kBlockQueries + r];
    joined.sum.sum += weight.sum;
    add(joined.x, weight.maximum,
        *reinterpret_cast<const float4*>(block.outputs + (w * kBlockQueries + r) * kOutputStride + column));
  }
  return joined;
}

}  // namespace narrows
