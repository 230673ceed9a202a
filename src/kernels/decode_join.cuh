// Joining what warps and thread blocks of the sm80 decode kernel have of the same packed rows.
//
// Parts are weighed by one expression against the largest of all maxima, and added up in their order: the bits do not depend on who
// joins, and a part without keys changes none.
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
        float* to = output_row(block, warp, 8 * r + 2 * at.c + e) + kStepColumns * i + 2 * kStepTiles * at.g;
#pragma unroll
        for (int j = 0; j < kStepTiles; j += 2)
          *reinterpret_cast<float4*>(to + 2 * j) =
              float4{o[r][i][j][e], o[r][i][j][2 + e], o[r][i][j + 1][e], o[r][i][j + 1][2 + e]};
      }
    }
  }
}

struct JoinedColumns {
  RowSum sum;
  float4 x;
};

// Four columns of packed row r. Every thread weighs the warps for itself: a warp that did it for all would keep them waiting.
inline JoinedColumns join_warps(const Block& block, int r, int column) {
  RowSum part[kWarps];
  JoinedColumns joined{{kHidden, 0.f}, {0, 0, 0, 0}};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    part[w] = block.sums[w * kBlockQueries + r];
    joined.sum.maximum = fmaxf(joined.sum.maximum, part[w].maximum);
  }
  const Rescale rescale(block.args.units, joined.sum.maximum);
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float factor = rescale.factor(part[w].maximum);
    joined.sum.sum += factor * part[w].sum;
    add(joined.x, factor, *reinterpret_cast<const float4*>(output_row(block, w, r) + column));
  }
  return joined;
}

// What the block has of the row: the results or, of a row that others have parts of, a part in scratch. Of 16 packed rows a thread has
// two places, for which it waits together.
inline void store_block(const Block& block) {
  const Facts& facts = block.facts;
  const bool whole = facts.slots.count == 1;
  const i64 slot = facts.slots.slot(facts.part);
  const int places = facts.packed_rows * kColumnGroups;
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x); first < places; first += kRows * kThreads) {
    JoinedColumns joined[kRows];
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const int index = n == 0 ? first : min_of(first + n * kThreads, places - 1);
      joined[n] = join_warps(block, index / kColumnGroups, index % kColumnGroups * 4);
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const int index = first + n * kThreads, r = index / kColumnGroups, column = index % kColumnGroups * 4;
      if (n != 0 && index >= places) break;
      if (whole) {
        store_result(block, result_of_row(block, r, joined[n].sum, column == 0), column, joined[n].x);
      } else {
        const i64 row = slot * kBlockQueries + r;
        store_global4(block.args.outputs + row * kColumns + column, joined[n].x);
        const float2 sum{joined[n].sum.maximum, joined[n].sum.sum};
        if (column == 0) *reinterpret_cast<float2*>(block.args.sums + row) = sum;
      }
    }
  }
}

// A warp joins the parts of some columns of a row, four columns in a lane. Where there are more warps than rows, half of the lanes
// have every other part.
constexpr int kJoinLanes = kRows == 1 && kWarps > 4 && kColumnGroups <= kWarp ? kWarp / 2 : kWarp;
constexpr int kJoinStep = kWarp / kJoinLanes;
constexpr int kJoinParts = 16 / kJoinStep;  // that a lane has on their way
constexpr int kRowJoins = ceil_div(kColumnGroups, kJoinLanes);
constexpr int kJoinRows = kBlocksOfMultiprocessor * kThreads > 256 ? 1 : kRows;  // at once, as far as registers go

// Parts of packed row r in scratch.
class RowParts {
 public:
  RowParts(const Block& block, int r) : slots_(block.facts.slots) {
    sums_ = reinterpret_cast<const float2*>(block.args.sums) + r;
    outputs_ = block.args.outputs + r * kColumns;
  }

  i32 count() const { return slots_.count; }

  RowSum sum(i32 part) const {
    if (part >= slots_.count) return {kHidden, 0.f};
    const float2 sum = __ldcg(sums_ + i64{slots_.slot(part)} * kBlockQueries);
    return {sum.x, sum.y};
  }

  // Of all parts. own: the sum of part number `lane`.
  float maximum(const RowSum& own) const {
    float most = own.maximum;
#pragma unroll 1
    for (i32 part = static_cast<i32>(threadIdx.x % kWarp) + kWarp; part < slots_.count; part += kWarp)
      most = fmaxf(most, sum(part).maximum);
    return warp_max(most);
  }

  // Four columns. Of a part that does not exist those of the last one: it will weigh 0.
  template <bool may_be_first> float4 columns(i32 part, i32 column) const {
    const i32 nearest = min_of(part, slots_.count - 1);
    const i32 slot = may_be_first ? slots_.slot(nearest) : slots_.other + nearest * slots_.step;
    if (kColumnGroups % kJoinLanes != 0 && column >= kColumns) return {0, 0, 0, 0};
    return __ldcg(reinterpret_cast<const float4*>(outputs_ + i64{slot} * kSlot + column));
  }

 private:
  static constexpr i32 kSlot = kBlockQueries * kColumns;

  PartSlots slots_;
  const float2* sums_;
  const float* outputs_;
};

inline void add_other_half(float4& x) {
  x.x += lane_xor(x.x, kJoinLanes);
  x.y += lane_xor(x.y, kJoinLanes);
  x.z += lane_xor(x.z, kJoinLanes);
  x.w += lane_xor(x.w, kJoinLanes);
}

// By a warp: four columns of packed rows r .. r + kJoinRows - 1 in each lane, of all of which parts are asked for before any is waited
// for. Of a row that does not exist those of the last one.
inline void join_rows(const Block& block, int r, i32 column) {
  const i32 lane = static_cast<i32>(threadIdx.x % kWarp), own_part = lane / kJoinLanes;
  const i32 last = block.facts.packed_rows - 1, count = block.facts.slots.count;
  const auto row = [&](int n) { return n == 0 ? r : min_of(r + n, last); };
  RowSum own[kJoinRows], sum[kJoinRows];
  float factor[kJoinRows];
  float4 x[kJoinRows];
#pragma unroll
  for (int n = 0; n < kJoinRows; ++n) {
    own[n] = RowParts(block, row(n)).sum(lane);
    sum[n] = {kHidden, 0.f};
    factor[n] = 0.f;
    x[n] = {0, 0, 0, 0};
  }
#pragma unroll 1
  for (i32 first = 0; first < count; first += kJoinParts * kJoinStep) {
    float4 part[kJoinRows][kJoinParts];
#pragma unroll
    for (int n = 0; n < kJoinRows; ++n) {
      const RowParts parts(block, row(n));
      part[n][0] = parts.columns<true>(first + own_part, column);
#pragma unroll
      for (int u = 1; u < kJoinParts; ++u) part[n][u] = parts.columns<false>(first + u * kJoinStep + own_part, column);
    }
#pragma unroll
    for (int n = 0; n < kJoinRows; ++n) {
      const RowParts parts(block, row(n));
      if (first == 0) sum[n].maximum = parts.maximum(own[n]);
      if (first % kWarp == 0) {
        if (first != 0) own[n] = parts.sum(first + lane);
        factor[n] = Rescale(block.args.units, sum[n].maximum).factor(own[n].maximum);
        sum[n].sum += warp_sum(factor[n] * own[n].sum);
      }
#pragma unroll
      for (int u = 0; u < kJoinParts; ++u)
        add(x[n], __shfl_sync(~0u, factor[n], first % kWarp + u * kJoinStep + own_part), part[n][u]);
    }
  }
#pragma unroll
  for (int n = 0; n < kJoinRows; ++n) {
    if constexpr (kJoinStep == 2) add_other_half(x[n]);
    if (n != 0 && r + n > last) break;
    const ResultRow result = result_of_row(block, row(n), sum[n], column == 0 && own_part == 0);
    if (own_part == 0) store_result(block, result, column, x[n]);
  }
}

// Whether all blocks that have a part of the row have stored it, this one among them.
inline bool is_last(const Block& block) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0)
    last = brings_last_part(SharedWord{block.args.tickets + block.facts.slots.first},
                            static_cast<u64>(block.facts.slots.count));
  __syncthreads();
  return last;
}

inline void join_blocks(const Block& block) {
  const i32 warp = static_cast<i32>(threadIdx.x) / kWarp, lane = static_cast<i32>(threadIdx.x) % kJoinLanes;
#pragma unroll 1
  for (i32 index = warp; index < ceil_div(block.facts.packed_rows, kJoinRows) * kRowJoins; index += kWarps)
    join_rows(block, index / kRowJoins * kJoinRows, 4 * (index % kRowJoins * kJoinLanes + lane));
}

}  // namespace narrows
