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

// Parts of a row are joined by the last of their blocks; where they are many, in groups first, because one multiprocessor takes long
// to read them all.
constexpr int kMostAtOnce = 8, kMostJoined = 16;
static_assert(kMostJoined * kMostJoined >= kMostParts);

// In place of Q, whose tile is used.
struct JoinRoom {
  ResultRow results[kBlockQueries];
  float most[kLookers][kBlockQueries];
  float factors[kMostJoined][kBlockQueries];
  float weights[kMostJoined][kBlockQueries];
};
static_assert(sizeof(JoinRoom) <= kStagesAt);

inline JoinRoom& join_room(const Block& block) { return *reinterpret_cast<JoinRoom*>(block.queries); }

inline i32 own_column() { return static_cast<i32>(threadIdx.x % kColumnGroups) * 4; }
inline i32 own_row() { return static_cast<i32>(threadIdx.x / kColumnGroups); }

// Four columns of a row, of what the block has.
inline const float4& own_part(const Block& block, i32 r, i32 column) {
  return *reinterpret_cast<const float4*>(block.outputs + r * kOutputStride + column);
}

// NaN, where an entry of the table was no page.
inline void break_rows(const Block& block) {
  if (const i32 r = static_cast<i32>(threadIdx.x); r < block.facts.packed_rows)
    block.sums[r].sum = as_float(0x7fffffffu);
}

// store(r, column, x) for columns of all rows.
template <class Store> inline void each_own(const Block& block, const Store& store) {
  const i32 column = own_column();
#pragma unroll 4
  for (i32 r = own_row(); r < block.facts.packed_rows; r += kColumnStep) store(r, column, own_part(block, r, column));
}

// Of rows that no other block has a part of.
inline void store_rows(const Block& block) {
  JoinRoom& room = join_room(block);
  if (const i32 r = static_cast<i32>(threadIdx.x); r < block.facts.packed_rows)
    room.results[r] = result_of_row(block, r, block.sums[r], true);
  __syncthreads();
  each_own(block, [&](i32 r, i32 column, const float4& x) { store_result(block, room.results[r], column, x); });
}

// To scratch.
inline void store_part(const Block& block) {
  const i64 first = i64{block.facts.slots.slot(block.facts.part)} * kBlockQueries;
  if (const i32 r = static_cast<i32>(threadIdx.x); r < block.facts.packed_rows)
    block.args.sums[first + r] = block.sums[r];
  each_own(block, [&](i32 r, i32 column, const float4& x) {
    store_global4(block.args.outputs + (first + r) * kColumns + column, x);
  });
}

// Parts that are joined together, of which number `own` is the block's and in its shared memory; -1: none is.
struct Joined {
  PartSlots slots;
  i32 own;
};

// Parts of a group.
inline i32 group_of(i32 parts) {
  if (parts <= kMostAtOnce) return parts;
  i32 group = 3;
  while (group * group < parts) ++group;
  return group;
}

// The group of the block's part.
inline Joined own_group(const Facts& facts) {
  const PartSlots& slots = facts.slots;
  const i32 group = group_of(slots.count), first = facts.part / group * group;
  return {{min_of(group, slots.count - first), slots.slot(first), slots.other + first * slots.step, slots.step},
          facts.part - first};
}

// The factors of all parts, and the sums of all rows.
inline void weigh_parts(const Block& block, const Joined& joined) {
  JoinRoom& room = join_room(block);
  const PartSlots& slots = joined.slots;
  const i32 r = static_cast<i32>(threadIdx.x) % kBlockQueries, looker = static_cast<i32>(threadIdx.x) / kBlockQueries;
  const auto sum_of = [&](i32 part) {
    if (part >= slots.count) return float2{kHidden, 0.f};
    if (part == joined.own) return float2{block.sums[r].maximum, block.sums[r].sum};
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
  for (i32 part = looker; part < slots.count; part += kLookers) {
    const float2 sum = part == looker ? own : sum_of(part);
    const float factor = rescale.factor(sum.x);
    room.factors[part][r] = factor;
    room.weights[part][r] = factor * sum.y;
  }
  __syncthreads();
  if (looker == 0) {
    float sum = 0.f;
#pragma unroll 4
    for (i32 part = 0; part < slots.count; ++part) sum += room.weights[part][r];
    block.sums[r] = {most, sum};
  }
  __syncthreads();
}

// store(r, column, x) for columns of all rows, each from all parts.
template <class Store> inline void join_columns(const Block& block, const Joined& joined, const Store& store) {
  constexpr int kRowsAtOnce = 8;
  constexpr i64 kSlot = kBlockQueries * kColumns;
  const JoinRoom& room = join_room(block);
  const i32 column = own_column(), rows = block.facts.packed_rows;
#pragma unroll 1
  for (i32 first = own_row(); first < rows; first += kRowsAtOnce * kColumnStep) {
    float4 x[kRowsAtOnce] = {};
    const auto add_part = [&](i32 part, const auto& columns_of) {
#pragma unroll
      for (int n = 0; n < kRowsAtOnce; ++n) {
        const i32 r = min_of(first + n * kColumnStep, rows - 1);
        add(x[n], room.factors[part][r], columns_of(r));
      }
    };
    const auto add_stored = [&](i32 from, i32 to) {
#pragma unroll 2
      for (i32 part = from; part < to; ++part) {
        const float* const stored = block.args.outputs + joined.slots.slot(part) * kSlot + column;
        add_part(part, [&](i32 r) { return __ldcg(reinterpret_cast<const float4*>(stored + r * kColumns)); });
      }
    };
    add_stored(0, joined.own);
    if (joined.own >= 0) add_part(joined.own, [&](i32 r) { return own_part(block, r, column); });
    add_stored(joined.own + 1, joined.slots.count);
#pragma unroll
    for (int n = 0; n < kRowsAtOnce; ++n)
      if (const i32 r = first + n * kColumnStep; r < rows) store(r, column, x[n]);
  }
}

// Some parts become one in the place of the first of them.
inline void join_group(const Block& block, const Joined& joined) {
  const i64 first = i64{joined.slots.first} * kBlockQueries;
  weigh_parts(block, joined);
  if (const i32 r = static_cast<i32>(threadIdx.x); r < block.facts.packed_rows)
    block.args.sums[first + r] = block.sums[r];
  join_columns(block, joined, [&](i32 r, i32 column, const float4& x) {
    store_global4(block.args.outputs + (first + r) * kColumns + column, x);
  });
}

inline void join_rows(const Block& block, const Joined& joined) {
  JoinRoom& room = join_room(block);
  weigh_parts(block, joined);
  if (const i32 r = static_cast<i32>(threadIdx.x); r < block.facts.packed_rows)
    room.results[r] = result_of_row(block, r, block.sums[r], true);
  __syncthreads();
  join_columns(block, joined,
               [&](i32 r, i32 column, const float4& x) { store_result(block, room.results[r], column, x); });
}

inline SharedWord ticket_of(const Block& block, i32 slot) { return {block.args.tickets + slot}; }

// By one thread, before the block's part is done: whether it is the last of its group.
inline bool comes_last(const Block& block) {
  const PartSlots group = own_group(block.facts).slots;
  return is_near_last(ticket_of(block, group.first), static_cast<u64>(group.count));
}

// Whether the block is the last of those that bring the parts counted in that slot's ticket, after all of it has stored its own.
inline bool is_last(const Block& block, bool& last, i32 slot, i32 parts) {
  __syncthreads();
  if (threadIdx.x == 0) last = brings_last_part(ticket_of(block, slot), static_cast<u64>(parts));
  __syncthreads();
  return last;
}

// last: what comes_last() said. Groups are joined by the last of their blocks in turn.
inline void join(const Block& block, bool& last) {
  const PartSlots& all = block.facts.slots;
  const Joined joined = own_group(block.facts);
  const SharedWord ticket = ticket_of(block, joined.slots.first);
  if (!last) {
    store_part(block);
    __syncthreads();
    if (threadIdx.x == 0) ticket.add(kStoredPart);
    return;
  }
  if (threadIdx.x == 0) wait_for_stored(ticket, static_cast<u64>(joined.slots.count));
  __syncthreads();
  if (joined.slots.count == all.count) return join_rows(block, joined);
  join_group(block, joined);
  const i32 group = group_of(all.count);
  const PartSlots groups{ceil_div(all.count, group), all.first, all.other, all.step * group};
  // No group begins with slot 1.
  if (is_last(block, last, all.slot(1), groups.count)) join_rows(block, {groups, -1});
}

}  // namespace narrows
