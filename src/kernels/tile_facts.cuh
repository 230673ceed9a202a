// What a warp that schedules finds out about a tile before the others begin it: some query rows of one head, and the keys that
// they see.
#pragma once
#include "kernels/query_block.cuh"
#include "shared/forward_sm90_args.h"

namespace narrows {

constexpr int kPartRows = 64;  // of a warpgroup
static_assert(kBlockQueries == kWarpgroups * kPartRows && kWarps == 4 * kWarpgroups);

struct TileFacts {
  QueryBlock block;
  bool exists;  // false: there are no more
  Keys blocks;  // of keys, from the last to the first; one at least, so that there is always a K and a V to wait for
  // Rows of V that may be read as they are: keys of the sequence that some row of it sees, and zeros that the engine fills in
  // behind the tensor. What others hold reaches no result: it may be NaN, which no weight of 0 hides.
  Keys clean;
  Keys common[kWarpgroups];                    // keys that all of a warpgroup's rows see
  Keys rows[kLimitsKeys ? kBlockQueries : 1];  // what each row sees, where it is not every key
};

// A call's window. Its planner takes no chunks: their 64-bit quotients are more than a scheduling thread's registers hold.
inline Mask window_of(const CallArgs& args) { return {args.visibility.left, args.visibility.right, 0}; }

inline Keys keys_of(const Range& range) { return {static_cast<i32>(range.begin), static_cast<i32>(range.end)}; }

inline i32 lane_index() { return static_cast<i32>(thread_index() % kWarp); }

// Each row's keys, and what a warpgroup's rows have in common; returns the hull of all. By a warp.
inline Keys look_at_rows(const ForwardSm90Args& args, const QueryBlock& block, TileFacts& facts) {
  Keys hull{kMostKey, 0};
#pragma unroll 1
  for (int w = 0; w < kWarpgroups; ++w) {
    Keys common{0, kMostKey};
#pragma unroll 1
    for (i32 row = w * kPartRows + lane_index(); row < (w + 1) * kPartRows; row += kWarp) {
      const i32 i = block.first_row + row;
      const bool exists = i < block.queries;
      const Keys seen = exists ? keys_of(visible_keys(window_of(args), i + block.shift, block.keys)) : Keys{0, 0};
      facts.rows[row] = seen;
      if (seen.begin < seen.end) hull = {min_of(hull.begin, seen.begin), max_of(hull.end, seen.end)};
      if (exists) common = {max_of(common.begin, seen.begin), min_of(common.end, seen.end)};
    }
    facts.common[w] = {__reduce_max_sync(~0u, common.begin), __reduce_min_sync(~0u, common.end)};
  }
  return {__reduce_min_sync(~0u, hull.begin), __reduce_max_sync(~0u, hull.end)};
}

inline Keys clean_values(const ForwardSm90Args& args, const QueryBlock& block) {
  Keys seen{0, block.keys};
  if constexpr (kLimitsKeys) seen = keys_of(key_range(window_of(args), {0, block.queries}, block.shift, block.keys));
  if (!is_varlen(args.cu_seqlens_k) && seen.end == args.key_rows) seen.end = kMostKey;
  return seen;
}

inline void find_facts(const ForwardSm90Args& args, const QueryBlock& block, TileFacts& facts) {
  Keys hull{0, block.keys};
  if constexpr (kLimitsKeys) {
    hull = look_at_rows(args, block, facts);
  } else {
    for (int w = 0; w < kWarpgroups; ++w) facts.common[w] = hull;
  }
  facts.block = block;
  facts.exists = true;
  facts.clean = clean_values(args, block);
  const bool sees = hull.begin < hull.end && !block.broken;
  facts.blocks = sees ? Keys{hull.begin / kBlockKeys, ceil_div(hull.end, kBlockKeys)} : Keys{0, 1};
}

// Varlen, with bounds that are some: the sequence of a block. Each lane looks at one of 32 sequences at equal distances, and the
// warp goes on between two of them. Sequence `batch` is of the rows behind the last one.
inline Part search_sequence(const CallArgs& args, i32 block) {
  const IndicesArg& starts = args.cu_seqlens_q;
  i32 low = 0;
  for (i32 count = args.batch + 1; count > 1;) {
    const i32 distance = ceil_div(count, kWarp), s = lane_index() * distance;
    const bool begun = s < count && first_block(at(starts, low + s), low + s, kBlockQueries) <= block;
    const i32 last = (__popc(__ballot_sync(~0u, begun)) - 1) * distance;
    low += last;
    count = min_of(distance, count - last);
  }
  const i32 begin = at(starts, low), end = low == args.batch ? args.query_rows : at(starts, low + 1);
  return {low, begin, end - begin, false};
}

// Hands out tiles in the order of tile_order.h. By a warp.
class Scheduler {
 public:
  // broken: the bounds of query rows are none.
  Scheduler(const ForwardSm90Args& args, bool broken) : args_(args), broken_(broken) {}

  // The tile at hand, or the first after it that has rows.
  void find(TileFacts& facts) {
    for (; next_ < args_.tiles; advance()) {
      const QueryBlock block = block_at(next_);
      if (block.rows == 0) continue;
      return find_facts(args_, block, facts);
    }
    facts.exists = false;
  }
  // To the tile behind it, once the others know of it: the counter is far away.
  void advance() {
    if (args_.tiles_taken == nullptr) {
      next_ += gridDim.x;
      return;
    }
    u32 taken = 0;
    if (lane_index() == 0) taken = atomicAdd(args_.tiles_taken, 1u);
    next_ = gridDim.x + __shfl_sync(~0u, taken, 0);
  }

 private:
  QueryBlock block_at(u32 index) const {
    const u32 blocks = static_cast<u32>(args_.blocks), section = static_cast<u32>(args_.section);
    const TileNumber tile = tile_number(index, blocks, query_pairs(args_), section);
    Part queries{tile.pair / args_.heads, 0, args_.query_rows, false};
    if (is_varlen(args_.cu_seqlens_q))
      queries = broken_ ? Part{0, 0, args_.query_rows, true} : search_sequence(args_, tile.block);
    return query_block_of(args_, queries, head_of(args_, tile), tile.block, lane_index() == 0);
  }

  const ForwardSm90Args& args_;
  bool broken_;
  u32 next_ = blockIdx.x;
};

}  // namespace narrows
