// Joining what warps and thread blocks have of the same packed rows, and the results.
//
// Parts are weighed by one expression against the largest of all maxima, and added up in their order: the bits do not depend on who
// joins, and a part without keys changes none.
#pragma once
#include "kernels/decode_block.cuh"
#include "kernels/softmax.cuh"

namespace narrows {

constexpr int kLaneColumns = ceil_div(kColumns, 4 * kWarp);  // groups of 4 that a lane has

inline float warp_max(float x) {
#pragma unroll
  for (int mask = kWarp / 2; mask != 0; mask /= 2) x = fmaxf(x, lane_xor(x, mask));
  return x;
}

struct JoinedRow {
  RowSum sum;
  float4 columns[kLaneColumns];  // 4 (lane + 32 n) and on
};

inline void add(float4& to, float factor, const float4& x) {
  to.x = __fmaf_rn(factor, x.x, to.x);
  to.y = __fmaf_rn(factor, x.y, to.y);
  to.z = __fmaf_rn(factor, x.z, to.z);
  to.w = __fmaf_rn(factor, x.w, to.w);
}

// By a warp. sum_of(part) and columns_of(part, column) give a part's; its lane is (part + offset) % 32.
template <class SumOf, class ColumnsOf>
inline JoinedRow join_parts(const Units<float>& units, i32 parts, i32 offset, const SumOf& sum_of,
                            const ColumnsOf& columns_of) {
  constexpr int kAtOnce = 8;
  const i32 lane = static_cast<i32>(threadIdx.x % kWarp);
  const auto own = [&](i32 first) {
    const i32 part = first + lane - offset;
    return 0 <= part && part < parts ? sum_of(part) : RowSum{kHidden, 0.f};
  };
  JoinedRow row{};
  RowSum found{kHidden, 0.f};
  float most = kHidden;
  for (i32 first = 0; first < parts + offset; first += kWarp) {
    found = own(first);
    most = fmaxf(most, found.maximum);
  }
  row.sum.maximum = warp_max(most);
  const Reference<float> reference = reference_of<ScalarMath>(units, row.sum.maximum);
  for (i32 first = 0; first < parts + offset; first += kWarp) {
    if (parts + offset > kWarp) found = own(first);
    const float factor =
        exp2_approx(rescale_exponent<ScalarMath>(units, reference_of<ScalarMath>(units, found.maximum), reference));
    row.sum.sum += warp_sum(factor * found.sum);
    const i32 begin = max_of(first, offset), end = min_of(first + kWarp, parts + offset);
    for (i32 next = begin; next < end; next += kAtOnce) {
      float4 x[kAtOnce][kLaneColumns];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u)
#pragma unroll
        for (int n = 0; n < kLaneColumns; ++n) {
          const i32 column = 4 * (lane + kWarp * n);
          x[u][n] = next + u < end && column < kColumns ? columns_of(next + u - offset, column) : float4{0, 0, 0, 0};
        }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const float weight = __shfl_sync(~0u, factor, (next + u) % kWarp);
        if (next + u < end)
#pragma unroll
          for (int n = 0; n < kLaneColumns; ++n) add(row.columns[n], weight, x[u][n]);
      }
    }
  }
  return row;
}

// A warp's part of the packed rows, to shared memory.
inline void keep_part(const Block& block, const Softmax& softmax, const Outputs& o) {
  const DecodeLane at;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float sum = quad_sum(softmax.sum[r]);
    if (at.c == 0) block.sums[warp * kBlockQueries + 8 * r + at.g] = {softmax.maximum[r], sum};
#pragma unroll
    for (int e = 0; e < 2; ++e)
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

inline JoinedRow join_warps(const Block& block, int r) {
  return join_parts(
      block.args.units, kWarps, 0, [&](i32 warp) { return block.sums[warp * kBlockQueries + r]; },
      [&](i32 warp, i32 column) {
        return *reinterpret_cast<const float4*>(block.outputs + (warp * kBlockQueries + r) * kOutputStride + column);
      });
}

inline void store_columns(const Block& block, char* row, i32 column, const float (&x)[4]) {
  const DecodeArgs& args = block.args;
  const i64 stride = args.o.strides[3];
  char* const at = row + column * stride;
  const bool whole = stride == kElementBytes && column + 4 <= args.value_dim;
  if (kElementBytes == 2 && whole && reinterpret_cast<u64>(at) % 8 == 0) {
    *reinterpret_cast<uint2*>(at) = uint2{pack(x[0], x[1]), pack(x[2], x[3])};
  } else if (kElementBytes == 4 && whole && reinterpret_cast<u64>(at) % 16 == 0) {
    *reinterpret_cast<float4*>(at) = float4{x[0], x[1], x[2], x[3]};
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (column + i < args.value_dim) store_number(at + i * stride, kElement, x[i]);
  }
}

// Of packed row r, by a warp.
inline void store_row(const Block& block, int r, const JoinedRow& joined) {
  const DecodeArgs& args = block.args;
  const CacheFacts& sequence = block.facts.sequence;
  const PackedRow row = packed_row(args, block.facts, r);
  const i32 lane = static_cast<i32>(threadIdx.x % kWarp);
  const float nan = as_float(0x7fffffffu);
  RowResult result = row_result(args.units, joined.sum.maximum, joined.sum.sum, args.sinks, row.head);
  if (row.query >= sequence.queries) result = {kHidden, 0.f};  // no query: no sink either
  if (sequence.broken) result = {nan, nan};
  if constexpr (kDropout) result.factor *= keep_factor<float>(args.dropout);
  const i64 query = sequence.first_query + row.query;
  if (lane == 0 && args.lse.data != nullptr)
    *reinterpret_cast<float*>(args.lse.data + sequence.sequence * args.lse.strides[0] + row.head * args.lse.strides[1] +
                              query * args.lse.strides[2]) = result.lse;
  char* const to =
      args.o.data + sequence.sequence * args.o.strides[0] + query * args.o.strides[1] + row.head * args.o.strides[2];
#pragma unroll
  for (int n = 0; n < kLaneColumns; ++n) {
    const i32 column = 4 * (lane + kWarp * n);
    const float4& x = joined.columns[n];
    const float scaled[4] = {x.x * result.factor, x.y * result.factor, x.z * result.factor, x.w * result.factor};
    if (column < args.value_dim) store_columns(block, to, column, scaled);
  }
}

// Packed row r's place in a slot of scratch.
inline i64 scratch_row(i64 slot, int r) { return slot * kBlockQueries + r; }

inline void store_part(const Block& block, i64 slot, int r, const JoinedRow& joined) {
  const i32 lane = static_cast<i32>(threadIdx.x % kWarp);
  const i64 row = scratch_row(slot, r);
  if (lane == 0) block.args.sums[row] = joined.sum;
#pragma unroll
  for (int n = 0; n < kLaneColumns; ++n) {
    const i32 column = 4 * (lane + kWarp * n);
    if (column < kColumns) *reinterpret_cast<float4*>(block.args.outputs + row * kColumns + column) = joined.columns[n];
  }
}

// offset: of the first part, among all that a sequence could have.
inline JoinedRow join_slots(const Block& block, const PartSlots& slots, i32 offset, int r) {
  const DecodeArgs& args = block.args;
  return join_parts(
      args.units, slots.count, offset,
      [&](i32 part) {
        const float2 sum = __ldcg(reinterpret_cast<const float2*>(args.sums + scratch_row(slots.slot(part), r)));
        return RowSum{sum.x, sum.y};
      },
      [&](i32 part, i32 column) {
        return __ldcg(
            reinterpret_cast<const float4*>(args.outputs + scratch_row(slots.slot(part), r) * kColumns + column));
      });
}

// body(r) for each packed row that the tensors have, one a warp.
template <class Body> inline void each_row(const Block& block, const Body& body) {
  for (int r = static_cast<int>(threadIdx.x) / kWarp; r < block.facts.rows; r += kWarps) body(r);
}

}  // namespace narrows
