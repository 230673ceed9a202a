// Joining what warps and thread blocks have of the same packed rows, and the results.
//
// Parts are weighed by one expression against the largest of all maxima, and added up in their order: the bits do not depend on who
// joins, and a part without keys changes none.
#pragma once
#include "kernels/decode_block.cuh"
#include "kernels/softmax.cuh"

namespace narrows {

constexpr int kColumnGroups = kColumns / 4;
constexpr int kLaneGroups = ceil_div(kColumnGroups, kWarp);  // of a row, that a lane has if a warp shares it

// Of what was accumulated relative to one maximum, to take it to another's reference.
inline float factor_between(const Units<float>& units, float from, float to) {
  return exp2_approx(
      rescale_exponent<ScalarMath>(units, reference_of<ScalarMath>(units, from), reference_of<ScalarMath>(units, to)));
}

inline void add(float4& to, float factor, const float4& x) {
  to.x = __fmaf_rn(factor, x.x, to.x);
  to.y = __fmaf_rn(factor, x.y, to.y);
  to.z = __fmaf_rn(factor, x.z, to.z);
  to.w = __fmaf_rn(factor, x.w, to.w);
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

struct JoinedColumns {
  RowSum sum;
  float4 x;
};

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

inline void store_columns(const DecodeArgs& args, char* row, i32 column, const float (&x)[4]) {
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

// Of packed row r: where its results go, and what is known of it without its columns.
struct ResultRow {
  char* to;
  float factor;
};

inline ResultRow result_of_row(const Block& block, int r, const RowSum& sum, bool first) {
  const DecodeArgs& args = block.args;
  const CacheFacts& sequence = block.facts.sequence;
  const PackedRow row = packed_row(args, block.facts, r);
  const float nan = as_float(0x7fffffffu);
  RowResult result = row_result(args.units, sum.maximum, sum.sum, args.sinks, row.head);
  if (row.query >= sequence.queries) result = {kHidden, 0.f};  // no query: no sink either
  if (sequence.broken) result = {nan, nan};
  if constexpr (kDropout) result.factor *= keep_factor<float>(args.dropout);
  const i64 query = sequence.first_query + row.query;
  if (first && args.lse.data != nullptr)
    *reinterpret_cast<float*>(args.lse.data + sequence.sequence * args.lse.strides[0] + row.head * args.lse.strides[1] +
                              query * args.lse.strides[2]) = result.lse;
  return {
      args.o.data + sequence.sequence * args.o.strides[0] + query * args.o.strides[1] + row.head * args.o.strides[2],
      result.factor};
}

inline void store_result(const Block& block, const ResultRow& row, i32 column, const float4& x) {
  if (column >= block.args.value_dim) return;
  store_columns(block.args, row.to, column, {x.x * row.factor, x.y * row.factor, x.z * row.factor, x.w * row.factor});
}

// What the block has of the row: the results or, of a row that others have parts of, a part in scratch.
inline void store_block(const Block& block) {
  const Facts& facts = block.facts;
  const bool whole = facts.slots.count == 1;
  const i64 slot = facts.slots.slot(facts.part);
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x); index < facts.packed_rows * kColumnGroups; index += kThreads) {
    const int r = index / kColumnGroups, column = index % kColumnGroups * 4;
    const JoinedColumns joined = join_warps(block, r, column);
    if (whole) {
      store_result(block, result_of_row(block, r, joined.sum, column == 0), column, joined.x);
    } else {
      const i64 row = slot * kBlockQueries + r;
      *reinterpret_cast<float4*>(block.args.outputs + row * kColumns + column) = joined.x;
      if (column == 0) block.args.sums[row] = joined.sum;
    }
  }
}

// The parts of packed row r in scratch, as a lane of the warp that joins them sees them.
class RowParts {
 public:
  RowParts(const Block& block, int r) : slots_(block.facts.slots) {
    sums_ = reinterpret_cast<const float2*>(block.args.sums) + r;
    outputs_ = block.args.outputs + r * kColumns + static_cast<i32>(threadIdx.x % kWarp) * 4;
  }

  i32 count() const { return slots_.count; }

  RowSum sum(i32 part) const {
    if (part >= slots_.count) return {kHidden, 0.f};
    const float2 sum = __ldcg(sums_ + i64{slots_.slot(part)} * kBlockQueries);
    return {sum.x, sum.y};
  }

  // Of so many parts, the lane's columns; parts that do not exist are 0.
  template <int parts> void load(i32 first, float4 (&x)[parts][kLaneGroups]) const {
    const float* const from = outputs_ + i64{slots_.other + first * slots_.step} * kSlot;
#pragma unroll
    for (int u = 0; u < parts; ++u) {
      const float* at = from + u * slots_.step * kSlot;
      if (u == 0 && first == 0) at = outputs_ + i64{slots_.first} * kSlot;
#pragma unroll
      for (int n = 0; n < kLaneGroups; ++n) {
        const bool exists = static_cast<int>(threadIdx.x % kWarp) + kWarp * n < kColumnGroups;
        x[u][n] = {0, 0, 0, 0};
        if (first + u < slots_.count && exists) x[u][n] = __ldcg(reinterpret_cast<const float4*>(at) + kWarp * n);
      }
    }
  }

 private:
  static constexpr i32 kSlot = kBlockQueries * kColumns;

  PartSlots slots_;
  const float2* sums_;
  const float* outputs_;
};

// By a warp. weights: room for kWarp.
inline void join_row(const Block& block, int r, RowSum* weights) {
  constexpr int kAtOnce = max_of(16 / kLaneGroups, 4);
  const i32 lane = static_cast<i32>(threadIdx.x % kWarp);
  const RowParts parts(block, r);
  RowSum own{}, sum{kHidden, 0.f};
  float4 x[kLaneGroups] = {};
#pragma unroll 1
  for (i32 first = 0; first < parts.count(); first += kAtOnce) {
    float4 part[kAtOnce][kLaneGroups];
    parts.load(first, part);
    if (first == 0) {
#pragma unroll 1
      for (i32 other = 0; other < parts.count(); other += kWarp) {
        own = parts.sum(other + lane);
        sum.maximum = fmaxf(sum.maximum, own.maximum);
      }
      sum.maximum = warp_max(sum.maximum);
    }
    if (first % kWarp == 0) {
      if (parts.count() > kWarp) own = parts.sum(first + lane);
      const float factor = factor_between(block.args.units, own.maximum, sum.maximum);
      __syncwarp();
      weights[lane] = {factor, factor * own.sum};
      __syncwarp();
    }
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const RowSum weight = weights[first % kWarp + u];
      sum.sum += weight.sum;
#pragma unroll
      for (int n = 0; n < kLaneGroups; ++n) add(x[n], weight.maximum, part[u][n]);
    }
  }
  const ResultRow row = result_of_row(block, r, sum, lane == 0);
#pragma unroll
  for (int n = 0; n < kLaneGroups; ++n) store_result(block, row, 4 * (lane + kWarp * n), x[n]);
}

// Whether all blocks that have a part of the row have stored it, this one among them.
inline bool is_last(const Block& block) {
  __shared__ bool last;
  __syncthreads();
  const u32 most = static_cast<u32>(block.facts.slots.count - 1);
  if (threadIdx.x == 0) last = count_up(block.args.tickets + block.facts.slots.first, most) == most;
  __syncthreads();
  return last;
}

inline void join_blocks(const Block& block) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  RowSum* const weights = reinterpret_cast<RowSum*>(block.outputs) + warp * kWarp;
#pragma unroll 1
  for (int r = warp; r < block.facts.packed_rows; r += kWarps) join_row(block, r, weights);
}

}  // namespace narrows
