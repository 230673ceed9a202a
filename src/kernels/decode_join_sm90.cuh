// Results of 64 packed rows in the sm90 decode kernel, and joining what several thread blocks have of them, by all threads. As
// decode_results.cuh: parts are weighed against the largest of all maxima and added up in their order.
#pragma once
#include "kernels/decode_tiles_sm90.cuh"
// which this asks for:
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
      store_global4(block.args.outputs + (first + r) * kColumns + column, x);
  }
}

// The factors of all parts, and the sums of all rows.
inline void weigh_parts(const Block& block, const PartSlots& slots, JoinRoom& room) {
  const i32 r = static_cast<i32>(threadIdx.x) % kBlockQueries, looker = static_cast<i32>(threadIdx.x) / kBlockQueries;
  const auto sum_of = [&](i32 part) {
    if (part >= slots.count) return float2{kHidden, 0.f};
    return __ldcg(reinterpret_cast<const float2*>(block.args.sums) + i64{slots.slot(part)} * kBlockQueries + r);
  };
  const float2 own = sum_of(looker);
  float most = own.x;
  for (i32 part = looker + kLookers; part < slots.count; part += kLookers) most = fmaxf(most, sum_of(part).x);
  room.most[looker][r] = most;
  __syncthreads();
#pragma unroll
  for (int other = 0; other < kLookers; ++other) most = fmaxf(most, room.most[other][r]);
  const Rescale rescale(block.args.units, most);
  float* const weights = block.outputs + r * kOutputStride;
  for (i32 part = looker; part < slots.count; part += kLookers) {
    const float2 sum = part == looker ? own : sum_of(part);
    const float factor = rescale.factor(sum.x);
    room.factors[part][r] = factor;
    weights[part] = factor * sum.y;
  }
  __syncthreads();
  if (looker == 0) {
    float sum = 0.f;
#pragma unroll 4
    for (i32 part = 0; part < slots.count; ++part) sum += weights[part];
    block.sums[r] = {most, sum};
  }
  __syncthreads();
}

// store(r, column, x) for columns of all rows, each from all parts.
template <class Store> inline void join_columns(const Block& block, const PartSlots& slots, const Store& store) {
  constexpr int kRowsAtOnce = 8;
  constexpr i64 kSlot = kBlockQueries * kColumns;
  const JoinRoom& room = *reinterpret_cast<const JoinRoom*>(block.queries);
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
      if (const i32 r = first + n * kColumnStep; r < rows) store(r, column, x[n]);
  }
}

// Some parts become one in the place of the first of them.
inline void join_group(const Block& block, const PartSlots& slots) {
  const i64 first = i64{slots.first} * kBlockQueries;
  weigh_parts(block, slots, *reinterpret_cast<JoinRoom*>(block.queries));
  if (const i32 r = static_cast<i32>(threadIdx.x); r < block.facts.packed_rows)
    block.args.sums[first + r] = block.sums[r];
  join_columns(block, slots, [&](i32 r, i32 column, const float4& x) {
    store_global4(block.args.outputs + (first + r) * kColumns + column, x);
  });
}

inline void join_rows(const Block& block, const PartSlots& slots) {
  JoinRoom& room = *reinterpret_cast<JoinRoom*>(block.queries);
  weigh_parts(block, slots, room);
  if (const i32 r = static_cast<i32>(threadIdx.x); r < block.facts.packed_rows)
    room.results[r] = result_of_row(block, r, block.sums[r], true);
  __syncthreads();
  join_columns(block, slots,
               [&](i32 r, i32 column, const float4& x) { store_result(block, room.results[r], column, x); });
}

// Whether the block is the last of those that bring the parts counted in that slot's ticket, after all of it has stored its own.
inline bool is_last(const Block& block, bool& last, i32 slot, i32 parts) {
  __syncthreads();
  if (threadIdx.x == 0) last = brings_last_part(SharedWord{block.args.tickets + slot}, static_cast<u64>(parts));
  __syncthreads();
  return last;
}

// Parts of a row that a block has left are joined by the last one to leave one; where they are many, in groups by the last one of
// each group before, because one multiprocessor takes long to read them all.
inline void join(const Block& block, bool& last) {
  constexpr i32 kMostAtOnce = 8;
  PartSlots slots = block.facts.slots;
  i32 ticket = slots.first;
  if (slots.count > kMostAtOnce) {
    i32 group = 3;
    while (group * group < slots.count) ++group;
    const i32 first = block.facts.part / group * group;
    const PartSlots own{min_of(group, slots.count - first), slots.slot(first), slots.other + first * slots.step,
                        slots.step};
    if (own.count > 1) {
      if (!is_last(block, last, own.first, own.count)) return;
      join_group(block, own);
    }
    ticket = slots.slot(1);  // no group begins with it
    slots = {ceil_div(slots.count, group), slots.first, slots.other, slots.step * group};
  }
  if (is_last(block, last, ticket, slots.count)) join_rows(block, slots);
}

}  // namespace narrows
