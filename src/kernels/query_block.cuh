// Facts of the query rows that a thread block computes: where they lie, how long their sequence is, and which keys each sees.
#pragma once
#include "kernels/products.cuh"
#include "shared/status.h"
#include "shared/tile_order.h"

namespace narrows {

struct QueryBlock {
  i32 sequence, head;
  i32 first_row;               // within the sequence
  i32 rows;                    // of them, that the tensors have; results are written for these
  i32 queries, keys;           // of the sequence, used
  i32 first_query, first_key;  // of the sequence, in the tensors
  i64 shift;
  bool broken;  // a length breaks a rule: the results are NaN
};

inline i32 at(const IndicesArg& values, i32 index) { return values.data[index * values.stride]; }

// The first breach of a call is kept. `reports`: of the threads that find the same one, this writes it.
inline bool breaks(const ForwardArgs& args, bool reports, i32 sequence, const Breach& breach) {
  if (breach.code == StatusCode::kept) return false;
  if (reports && args.status != nullptr && atomicCAS(args.status, 0, static_cast<i32>(breach.code)) == 0) {
    args.status[1] = sequence;
    args.status[2] = breach.value;
    args.status[3] = breach.limit;
  }
  return true;
}

// Varlen: finds the sequence of a block by looking at all bounds, and whether these are bounds. Rows behind the last sequence
// are one more, of no query. With broken bounds every row of the tensor counts as one sequence's.
inline void find_sequence(const ForwardArgs& args, i32 block, bool reports, QueryBlock& found) {
  __shared__ i32 place[2];  // sequence, and its first row
  __shared__ bool broken;
  if (threadIdx.x == 0) broken = false;
  __syncthreads();
  for (i32 s = static_cast<i32>(threadIdx.x); s <= args.batch; s += kThreads) {
    const bool last = s == args.batch;
    const i32 begin = at(args.cu_seqlens_q, s), end = last ? args.query_rows : at(args.cu_seqlens_q, s + 1);
    const Breach breach = last ? bounds_breach(StatusCode::cu_seqlens_q_start, 0, begin, end, true)
                               : bounds_breach(StatusCode::cu_seqlens_q_start, begin, end, args.query_rows, s == 0);
    if (breaks(args, reports, min_of(s, args.batch - 1), breach))
      broken = true;
    else if (first_block(begin, s, kBlockQueries) <= block && block < first_block(end, s + 1, kBlockQueries)) {
      place[0] = s;
      place[1] = begin;
    }
  }
  __syncthreads();
  found.broken = broken;
  found.sequence = broken ? 0 : place[0];
  found.first_query = broken ? 0 : place[1];
  found.first_row =
      (block - static_cast<i32>(broken ? 0 : first_block(place[1], place[0], kBlockQueries))) * kBlockQueries;
}

// Lengths that break a rule are taken as the nearest that do not: nothing outside the tensors is read.
inline void find_queries(const ForwardArgs& args, bool reports, i32 owned, QueryBlock& block) {
  const i32 s = block.sequence;
  block.queries = owned;
  if (args.seqused_q.data) {
    const i32 used = at(args.seqused_q, s);
    block.broken |= breaks(args, reports, s, used_breach(StatusCode::seqused_q, used, owned));
    block.queries = clamp_to(used, 0, owned);
  }
  block.broken |= breaks(args, reports, s, reach_breach(StatusCode::score_rows, block.queries, args.score_rows));
}

inline void find_keys(const ForwardArgs& args, bool reports, QueryBlock& block) {
  const i32 s = block.sequence;
  i32 begin = 0, end = args.key_rows;
  if (args.cu_seqlens_k.data) {
    begin = at(args.cu_seqlens_k, s);
    end = at(args.cu_seqlens_k, s + 1);
    block.broken |=
        breaks(args, reports, s, bounds_breach(StatusCode::cu_seqlens_k_start, begin, end, args.key_rows, s == 0));
    begin = clamp_to(begin, 0, args.key_rows);
    end = clamp_to(end, begin, args.key_rows);
  }
  block.first_key = begin;
  block.keys = end - begin;
  if (args.seqused_k.data) {
    const i32 used = at(args.seqused_k, s);
    block.broken |= breaks(args, reports, s, used_breach(StatusCode::seqused_k, used, block.keys));
    block.keys = clamp_to(used, 0, block.keys);
  }
  block.broken |= breaks(args, reports, s, reach_breach(StatusCode::score_keys, block.keys, args.score_keys));
}

inline QueryBlock find_block(const ForwardArgs& args, u32 index) {
  const bool varlen = args.cu_seqlens_q.data != nullptr;
  const u32 pairs = static_cast<u32>(varlen ? args.heads : args.batch * args.heads);
  const TileNumber tile = tile_number(index, static_cast<u32>(args.blocks), pairs, static_cast<u32>(args.section));
  const i32 head = varlen ? tile.pair : tile.pair % args.heads;
  QueryBlock block{};
  block.head = head;
  i32 owned = args.query_rows;
  if (varlen) {
    find_sequence(args, tile.block, head == 0 && tile.block == 0, block);
    const i32 end = block.sequence < args.batch && !block.broken ? at(args.cu_seqlens_q, block.sequence + 1) : owned;
    owned = end - block.first_query;
  } else {
    block.sequence = tile.pair / args.heads;
    block.first_row = tile.block * kBlockQueries;
  }
  block.rows = clamp_to(owned - block.first_row, 0, kBlockQueries);
  if (block.sequence >= args.batch || block.broken) return block;
  const bool reports = head == 0 && block.first_row == 0 && threadIdx.x == 0;
  find_queries(args, reports, owned, block);
  find_keys(args, reports, block);
  block.shift = i64{block.keys} - block.queries;
  if (args.top_left) block.shift = 0;
  if (args.shift.data) block.shift = at(args.shift, block.sequence);
  if (args.offset.place)
    block.broken |= breaks(args, reports, block.sequence, offset_breach(static_cast<u64>(*args.offset.place)));
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
