// Rows of K, V and Q to shared memory in the sm90 decode kernel. By threads, since a cache's rows lie in pages of any size.
#pragma once
#include "kernels/decode_tiles_sm90.cuh"

namespace narrows {

// A warp's rows of a tile: lane l has the address of row first + l.
inline void copy_rows(u32 tile, int first, const char* rows, int bytes) {
  constexpr int kAtOnce = kWarp / 8;  // rows, of which 8 lanes take 128 bytes
  const int lane = static_cast<int>(threadIdx.x % kWarp), byte = lane % 8 * kUnitBytes;
#pragma unroll
  for (int below = 0; below < kBlockKeys / kBringWarps; below += kAtOnce) {
    const char* const from = from_lane(rows, below + lane / 8) + byte;
    const UnitAddress<kStageTile> to(tile, first + below + lane / 8, lane % 8);
#pragma unroll
    for (int at = 0; at < kStageTile.row_bytes; at += kChunkBytes)
      copy_async<kUnitBytes>(to.at(at / kUnitBytes, 0), from + at, at + byte < bytes);
  }
}

// By the warps that bring. Where a tile's rows are is looked up while the one before it is on its way.
inline void bring(const Block& block, const Tiles& tiles, Ring& ring, bool shares, int warp) {
  const DecodeArgs& args = block.args;
  const Facts& facts = block.facts;
  const int first = warp * (kBlockKeys / kBringWarps), lane = static_cast<int>(threadIdx.x % kWarp);
  if (facts.first_tile >= facts.end_tile) return;  // there may be no row to look for
  HeadRows keys(block, args.k), values(block, args.v);
  const auto fill = [&](const char* rows, i32 columns) {
    wait_barrier(tiles.empty(ring), ring.phase ^ 1);
    copy_rows(tiles.stage(ring), first, rows, columns * kElementBytes);
    arrive_after_copies(tiles.full(ring));
    ring.next();
  };
  i32 key = facts.first_tile * kTileKeys + first + lane;
  const char *key_row = keys.row_of(key), *value_row = shares ? nullptr : values.row_of(key);
#pragma unroll 1
  for (i32 tile = facts.first_tile; tile < facts.end_tile; ++tile) {
    key += kTileKeys;
    fill(key_row, args.head_dim);
    key_row = keys.row_of(key);
    if (shares) continue;
    fill(value_row, args.value_dim);
    value_row = values.row_of(key);
  }
  if (__any_sync(~0u, keys.is_broken() || values.is_broken())) tiles.beside.broken = true;
}

// All packed rows of Q, by the threads that compute, some of which share a row; rows and columns that do not exist are 0.
inline void load_queries(const Block& block, u32 to) {
  constexpr int kSharers = kComputeThreads / kBlockQueries, kRowUnits = kQueryTile.row_bytes / kUnitBytes;
  const int r = static_cast<int>(threadIdx.x) / kSharers, first = static_cast<int>(threadIdx.x) % kSharers;
  const PackedRow row = packed_row(block.args, block.facts, r);
  const int bytes = exists(block.facts, row, r) ? block.args.head_dim * kElementBytes : 0;
  const char* const from = bytes ? query_row(block, row) : block.args.q.data;
#pragma unroll kTurnsQueries ? 1 : kRowUnits
  for (int unit = first; unit < kRowUnits; unit += kSharers) {
    const u32 place = to + kQueryTile.offset(r, unit);
    const bool given = unit * kUnitBytes < bytes;
    if (kTurnsQueries && given)
      gather_query(block, row, unit * kUnitBytes, place);
    else
      copy_async<kUnitBytes>(place, from + unit * kUnitBytes, given);
  }
  commit_copies();
  wait_copies<0>();
  fence_async_shared();
}

}  // namespace narrows
