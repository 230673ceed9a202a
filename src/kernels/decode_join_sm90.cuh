// Results of 64 packed rows in the sm90 decode kernel, and joining what several thread blocks have of them, by all threads. As
// decode_results.cuh: parts are weighed against the largest of all maxima and added up in their order.
#pragma once
#include "kernels/decode_tiles_sm90.cuh"

#include "kernels/decode_results.cuh"

namespace narrows {

constexpr int kColumnStep = kThreads / kColumnGroups;  // packed rows between those of which a thread has columns
constexpr int kLookers = kThreads / kBlockQueries;     // threads that look at the parts of a row
static_assert(kThreads % kColumnGroups == 0 && kThreads % kBlockQueries == 0);

// In place of Q, whose tile is used.
struct JoinRoom {
  ResultRow results[kBlockQueries];
  float most[kLookers][kBlockQueries];
  float factors[kMostParts][kBlockQueries];
};
static_assert(sizeof(JoinRoom) <= kStagesAt && kMostParts <= kOutputStride, "weights of parts fit in the place of O");

inline i32 own_column() { return static_cast<i32>(threadIdx.x % kColumnGroups) * 4; }
inline i32 own_row() { return static_cast<i32>(threadIdx.x / kColumnGroups); }

// What the block has of the rows: the results or, of rows that others have parts of, a part in scratch.
inline void store_rows(const Block& block, bool broken) {
  JoinRoom& room = *reinterpret_cast<JoinRoom*>(block.queries);
  const Facts& facts = block.facts;
  const bool whole = facts.slots.count == 1;
  const i64 first = i64{facts.slots.slot(facts.part)} * kBlockQueries;
  if (const i32 r = static_cast<i32>(threadIdx.x); r < facts.packed_rows) {
    RowSum sum = block.sums[r];
    if (broken) sum.sum = as_float(0x7fffffffu);
    if (whole)
      room.results[r] = result_of_row(block, r, sum, true);
    else
      block.args.sums[first + r] = sum;
  }
  __syncthreads();
  const i32 column = own_column();
#pragma unroll 4
  for (i32 r = own_row(); r < facts.packed_rows; r += kColumnStep) {
    const float4 x = *reinterpret_cast<const float4*>(block.outputs + r * kOutputStride + column);
    if (whole)
      store_result(block, room.results[r], column, x);
    else
      *reinterpret_cast<float4*>(block.args.outputs + (first + r) * kColumns + column) = x;
  }
}

// The factors of all parts, and the results of all rows without their columns.
inline void weigh_parts(const Block& block, JoinRoom& room) {
  const PartSlots slots = block.facts.slots;
  const i32 r = static_cast<i32>(threadIdx.x) % kBlockQueries, looker = static_cast<i32>(threadIdx.x) / kBlockQueries;
  const float2* const sums = reinterpret_cast<const float2*>(block.args.sums) + r;
  float most = kHidden;
  for (i32 part = looker; part < slots.count; part += kLookers)
    most = fmaxf(most, __ldcg(sums + i64{slots.slot(part)} * kBlockQueries).x);
  room.most[looker][r] = most;
  __syncthreads();
#pragma unroll
  for (int other = 0; other < kLookers; ++other) most = fmaxf(most, room.most[other][r]);
  float* const weights = block.outputs + r * kOutputStride;
  for (i32 part = looker; part < slots.count; part += kLookers) {
    const float2 sum = __ldcg(sums + i64{slots.slot(part)} * kBlockQueries);
    const float factor = factor_between(block.args.units, sum.x, most);
    room.factors[part][r] = factor;
    weights[part] = factor * sum.y;
  }
  __syncthreads();
  if (looker == 0 && r < block.facts.packed_rows) {
    float sum = 0.f;
#pragma unroll 4
    for (i32 part = 0; part < slots.count; ++part) sum += weights[part];
    room.results[r] = result_of_row(block, r, {most, sum}, true);
  }
  __syncthreads();
}

inline void join_rows(const Block& block) {
  constexpr int kRowsAtOnce = 4;
  constexpr i64 kSlot = kBlockQueries * kColumns;
  JoinRoom& room = *reinterpret_cast<JoinRoom*>(block.queries);
  weigh_parts(block, room);
  const PartSlots slots = block.facts.slots;
  const i32 column = own_column(), rows = block.facts.packed_rows;
#pragma unroll 1
  for (i32 first = own_row(); first < rows; first += kRowsAtOnce * kColumnStep) {
    float4 x[kRowsAtOnce] = {};
#pragma unroll 2
    for (i32 part = 0; part < slots.count; ++part) {
      const float* const from = block.args.outputs + slots.slot(part) * kSlot + column;
#pragma unroll
      for (int n = 0; n < kRowsAtOnce; ++n) {
        const i32 r = min_of(first + n * kColumnStep, rows - 1);
        add(x[n], room.factors[part][r], __ldcg(reinterpret_cast<const float4*>(from + r * kColumns)));
      }
    }
#pragma unroll
    for (int n = 0; n < kRowsAtOnce; ++n)
      if (const i32 r = first + n * kColumnStep; r < rows) store_result(block, room.results[r], column, x[n]);
  }
}

}  // namespace narrows
