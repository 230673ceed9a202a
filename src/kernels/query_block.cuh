// Which keys the query rows of a thread block see.
#pragma once
#include "kernels/forward_tiles.cuh"
#include "kernels/sequences.cuh"
#include "shared/forward_args.h"

namespace narrows {

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
  const Keys seen = exists ? seen_keys(args, block, i) : Keys{0, 0};
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
