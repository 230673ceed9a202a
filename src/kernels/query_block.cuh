// Facts of the query rows that a thread block computes: where they lie, how long their sequence is, and which keys each sees.
#pragma once
#include "kernels/forward_tiles.cuh"
#include "kernels/sequences.cuh"
#include "shared/forward_args.h"

namespace narrows {

struct QueryBlock : SequenceFacts {
  i32 head;
  i32 first_row;  // within the sequence
  i32 rows;       // of them, that the tensors have; results are written for these
};

inline QueryBlock find_block(const ForwardArgs& args, u32 index) {
  const bool varlen = args.cu_seqlens_q.data != nullptr;
  const u32 pairs = static_cast<u32>(varlen ? args.heads : args.batch * args.heads);
  const TileNumber tile = tile_number(index, static_cast<u32>(args.blocks), pairs, static_cast<u32>(args.section));
  const i32 head = varlen ? tile.pair : tile.pair % args.heads;
  Part queries{tile.pair / args.heads, 0, args.query_rows, false};
  i32 first_row = tile.block * kBlockQueries;
  if (varlen) {
    queries = find_sequence(args, query_bounds(args), tile.block, kBlockQueries, head == 0 && tile.block == 0);
    first_row -= static_cast<i32>(first_block(queries.begin, queries.sequence, kBlockQueries)) * kBlockQueries;
  }
  QueryBlock block{};
  block.sequence = queries.sequence;
  block.first_query = queries.begin;
  block.broken = queries.broken;
  if (queries.sequence < args.batch && !queries.broken) {
    const bool reports = head == 0 && first_row == 0 && threadIdx.x == 0;
    const Part keys = part_of(args, key_bounds(args), queries.sequence, reports);
    static_cast<SequenceFacts&>(block) = facts_of(args, queries, keys, reports);
  }
  block.head = head;
  block.first_row = first_row;
  block.rows = clamp_to(queries.count - first_row, 0, kBlockQueries);
  return block;
}

// Keys as 32-bit numbers.
struct Keys {
  i32 begin, end;
};

// Of some rows: the hull of what they see, and the keys that each of them sees. Rows that do not exist see nothing, and do not
// count.
struct Sight {
  Keys hull, common;
};

constexpr i32 kMostKey = 0x7fffffff;

// Each lane finds what one row of its warp sees and leaves it in shared memory, for the lanes that hold the row's scores; and the
// warp, what all its rows do. Visible to the block after its next barrier.
inline void look(const ForwardArgs& args, const QueryBlock& block, Keys* rows, Sight* sights) {
  const i32 lane = static_cast<i32>(threadIdx.x) % kWarp, warp = static_cast<i32>(threadIdx.x) / kWarp;
  const i32 i = block.first_row + warp * kWarpRows + lane;
  const bool exists = lane < kWarpRows && i < block.queries;
  Keys seen{0, 0};
  if (exists) {
    const Range range = visible_keys(args.visibility, i + block.shift, block.keys);
    seen = {static_cast<i32>(range.begin), static_cast<i32>(range.end)};
  }
  if (lane < kWarpRows) rows[warp * kWarpRows + lane] = seen;
  const bool sees = seen.begin < seen.end;
  const Keys hull{__reduce_min_sync(~0u, sees ? seen.begin : kMostKey), __reduce_max_sync(~0u, sees ? seen.end : 0)};
  const Keys common{__reduce_max_sync(~0u, exists ? seen.begin : 0),
                    __reduce_min_sync(~0u, exists ? seen.end : kMostKey)};
  if (lane == 0) sights[warp] = {hull, common};
}

// The hull of all warps' keys.
inline Keys block_hull(const Sight* sights) {
  Keys all = sights[0].hull;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) all = {min_of(all.begin, sights[w].hull.begin), max_of(all.end, sights[w].hull.end)};
  return all;
}

}  // namespace narrows
