// What a warp that schedules finds out about a tile before the others begin it: some query rows of one head, and the
// keys that they see.
#pragma once
#include "kernels/cached_facts.cuh"

namespace narrows {

constexpr int kPartRows = 64;  // of a warpgroup
static_assert(kBlockQueries == kWarpgroups * kPartRows && kWarps == 4 * kWarpgroups);

// A position as a 32-bit number that behaves like it beside keys, which are below 2^31 - 1024, with a tile's rows
// added.
inline i32 near_position(i64 p) { return static_cast<i32>(clamp_to(p, i64{-1024}, i64{0x7fffffff - 1024})); }

// Which keys the rows of a tile see. Positions of rows follow each other, so everything is row 0's, and what to add for
// row r.
struct TileSight {
  i32 begin, end;   // of its window, not clipped
  i32 keys;         // of the sequence
  i32 chunk;        // 0: none
  i32 chunk_begin;  // of its chunk
  i32 rest;         // rows before the next one begins, at a key that is
  i32 next;

  Keys of(i32 r) const {
    Keys seen{begin + r, end + r};
    if (chunk != 0) {
      const Keys own = chunk_of(r);
      seen = {max_of(seen.begin, own.begin), min_of(seen.end, own.end)};
    }
    return {clamp_to(seen.begin, 0, keys), clamp_to(seen.end, 0, keys)};
  }
  Keys chunk_of(i32 r) const {
    if (r < rest) return {chunk_begin, next};
    const u32 size = static_cast<u32>(min_of(chunk, kBlockQueries));  // of a longer one no second one begins here
    const i32 first = next + static_cast<i32>(static_cast<u32>(r - rest) / size) * chunk;
    return {first, first > kMostKey - chunk ? kMostKey : first + chunk};
  }
};

struct TileFacts : CacheRow<kCached> {
  QueryBlock block;
  i32 kv_head;
  bool exists;  // false: there are no more
  Keys blocks;  // of keys, from the last to the first; one at least, so that there is always a K and a V to wait for
  // Rows of V that may be read as they are: keys of the sequence that some row of it sees, and zeros that the engine
  // fills in behind the tensor. What others hold reaches no result: it may be NaN, which no weight of 0 hides.
  Keys clean;
  Keys common[kWarpgroups];  // keys that all of a warpgroup's rows see
  // Of `blocks`, those that it computes: but for those in which no row of it sees a key, one at the beginning and one for
  // each stage but one at the end.
  Keys own[kWarpgroups];
  TileSight sight;  // where they do not see every key

  // Keys that are read of a cache: those of the tile's blocks in `clean`.
  Keys read() const {
    return {max_of(blocks.begin * kBlockKeys, clean.begin), min_of(blocks.end * kBlockKeys, clean.end)};
  }
};

inline i32 lane_index() { return static_cast<i32>(thread_index() % kWarp); }

// The largest multiple of `divisor` up to x, a position. Without a division: its 64-bit form is a call, and calls make
// ptxas run wgmma one by one.
inline i64 multiple_below(i64 x, i64 divisor) {
  const i64 size = x < 0 ? divisor - 1 - x : x;
  i64 rest = size;
#pragma unroll 1
  for (int bit = 32; bit >= 0; --bit)
    if (divisor <= rest >> bit) rest -= divisor << bit;
  return x < 0 ? rest - size : size - rest;
}

// Of rows from `row` on.
inline TileSight sight_of(const Mask& mask, const SequenceFacts& facts, i32 row) {
  const i64 p = row + facts.shift;
  TileSight sight{near_position(p - mask.left), near_position(p + mask.right + 1), facts.keys, 0, 0, 0, 0};
  if (mask.chunk != 0) {
    const i64 begin = multiple_below(p, mask.chunk), end = begin + mask.chunk;
    sight.chunk = near_position(mask.chunk);
    sight.chunk_begin = near_position(begin);
    sight.rest = static_cast<i32>(min_of(end - p, i64{kBlockQueries}));
    sight.next = near_position(end);
  }
  return sight;
}

inline Keys own_blocks(const Keys& blocks, const Keys& seen) {
  Keys own = blocks;
  const i32 least = max_of(blocks.begin + 1, blocks.end - (kStages - 1));  // more would wait for each other
  own.end = max_of(min_of(ceil_div(seen.end, kBlockKeys), blocks.end), least);
  if (own.begin + 1 < own.end && (own.begin + 1) * kBlockKeys <= seen.begin) ++own.begin;
  return own;
}

inline Keys blocks_of(const Keys& seen) {
  return seen.begin < seen.end ? Keys{seen.begin / kBlockKeys, ceil_div(seen.end, kBlockKeys)} : Keys{0, 1};
}

inline Keys of_lanes(const Keys& keys, i32 of_begin, i32 of_end) {
  return {static_cast<i32>(__shfl_sync(~0u, static_cast<u32>(keys.begin), of_begin)),
          static_cast<i32>(__shfl_sync(~0u, static_cast<u32>(keys.end), of_end))};
}

// Whether the sequence has a row that sees keys as its lengths say. Else its row of the table, which may be none, is not
// looked at.
inline bool reads_keys(const SequenceFacts& facts) { return facts.queries > 0 && !facts.broken; }

// What a tile's rows see. Both ends never fall from row to row (mask.h), so that first and last rows tell everything: a
// warpgroup's are those of lanes 2w and 2w + 1, the sequence's those of the last two lanes. A warp's lanes side by side
// rather than one row after the other: this runs once in a while from a cold instruction cache, and every tile waits
// for it.
inline void look_at_rows(const ForwardSm90Args& args, const QueryBlock& block, TileFacts& facts) {
  constexpr i32 kFirstOfAll = kWarp - 2, kLastOfAll = kWarp - 1;
  const i32 lane = lane_index(), rows = block.broken ? 0 : min_of(block.queries - block.first_row, kBlockQueries);
  const i32 first = lane / 2 * kPartRows, last = min_of(first + kPartRows, rows) - 1;
  const i32 origin = lane == kFirstOfAll ? 0 : lane == kLastOfAll ? block.queries - 1 : block.first_row;
  const TileSight sight = sight_of(args.visibility, block, origin);
  const Keys seen = sight.of(lane >= kFirstOfAll ? 0 : lane % 2 == 0 ? first : last);
  const Keys other = of_lanes(seen, lane ^ 1, lane ^ 1), hull = of_lanes(seen, 0, (rows - 1) / kPartRows * 2 + 1);
  const Keys blocks = blocks_of(rows > 0 ? hull : Keys{0, 0});
  facts.blocks = blocks;
  if (lane % 2 == 0 && lane / 2 < kWarpgroups) {
    facts.common[lane / 2] = first <= last ? Keys{other.begin, seen.end} : Keys{0, kMostKey};
    facts.own[lane / 2] = own_blocks(blocks, first <= last ? Keys{seen.begin, other.end} : Keys{0, 0});
  }
  if (lane == 0) facts.sight = sight;
  const Keys clean = of_lanes(seen, kFirstOfAll, kLastOfAll);
  facts.clean = reads_keys(block) ? clean : Keys{0, 0};
}

inline void find_facts(const ForwardSm90Args& args, const QueryBlock& block, TileFacts& facts) {
  if constexpr (kLimitsKeys) {
    look_at_rows(args, block, facts);
  } else {
    const Keys all{0, reads_keys(block) ? block.keys : 0};
    facts.blocks = blocks_of(block.first_row < block.queries ? all : Keys{0, 0});
    facts.clean = all;
  }
  if (!kCached && !is_varlen(args.cu_seqlens_k) && facts.clean.end == args.key_rows) facts.clean.end = kMostKey;
  facts.block = block;
  facts.kv_head = static_cast<i32>(args.group_divisor.quotient(static_cast<u32>(block.head)));
  facts.exists = true;
}

// Then, of keys in a cache. By a warp.
inline void find_pages(const DecodeArgs& cache, i32 row, TileFacts& facts) {
  __syncwarp();
  const bool misses = misses_page(cache, facts.block, row, facts.read());
  facts.set_cache_row(row);
  if (misses) facts.block.broken = true;  // the nearest page is read in the place of one that is none
}

// Varlen, with bounds that are some: the sequence of a block. Each lane looks at one of 32 sequences at equal
// distances, and the warp goes on between two of them. Sequence `batch` is of the rows behind the last one.
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
      find_facts(args_, block, facts);
      if constexpr (kCached) find_pages(cached_args(args_).cache, cache_row_, facts);
      return;
    }
    facts.exists = false;
  }
  // Else every gridDim.x-th tile is this thread block's.
  bool takes_as_it_comes() const { return args_.tiles_taken != nullptr; }
  // To the tile behind it.
  void advance() {
    if (!takes_as_it_comes()) {
      next_ += gridDim.x;
      return;
    }
    u32 taken = 0;
    if (lane_index() == 0) taken = atomicAdd(args_.tiles_taken, 1u);
    next_ = gridDim.x + __shfl_sync(~0u, taken, 0);
  }

 private:
  QueryBlock block_at(u32 index) {
    const TileNumber tile = args_.order.at(index);
    if (is_varlen(args_.cu_seqlens_q)) {
      const Part queries = broken_ ? Part{0, 0, args_.query_rows, true} : search_sequence(args_, tile.block);
      return block_of(queries, tile.pair, tile.block);
    }
    const i32 sequence = static_cast<i32>(args_.heads_divisor.quotient(static_cast<u32>(tile.pair)));
    return block_of({sequence, 0, args_.query_rows, false}, tile.pair - sequence * args_.heads, tile.block);
  }
  QueryBlock block_of(const Part& queries, i32 head, i32 number) {
    const bool reports = lane_index() == 0;
    if constexpr (kCached)
      return cached_block_of(cached_args(args_).cache, queries, head, number, reports, cache_row_);
    else
      return query_block_of(args_, queries, head, number, reports);
  }

  const ForwardSm90Args& args_;
  bool broken_;
  u32 next_ = blockIdx.x;
  i32 cache_row_ = 0;  // of the tile at hand
};

}  // namespace narrows
