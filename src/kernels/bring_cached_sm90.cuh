// Keys and values in a cache or in pages, for the sm90 forward kernel. Where boxes of 16 rows and more lie whole in a
// page the engine brings them, a lane for each; where pages are smaller, or keys begin anywhere in them, rows are
// gathered. One warp brings those of K, one those of V.
//
// What no row of the sequence sees is not asked for, nor is its page looked up: there may be none.
#pragma once
#include "kernels/bring_sm90.cuh"

namespace narrows {

template <bool cached> struct KernelArgsOf { using Type = ForwardSm90Args; };
template <> struct KernelArgsOf<true> { using Type = CachedForwardArgs; };
using KernelArgs = KernelArgsOf<kCached>::Type;

// A tile's keys in the cache, as a thread that brings them has noted them.
struct CachedKeys {
  const CachedForwardArgs& args;
  i32 row, first_key, kv_head;
  Keys clean, blocks;

  CachedKeys(const CachedForwardArgs& call, const TileFacts& facts)
      : args(call),
        row(facts.cache_row()),
        first_key(facts.block.first_key),
        kv_head(facts.kv_head),
        clean(facts.clean),
        blocks(facts.blocks) {}

  Slot slot(i32 key) const { return slot_of(args.cache, row, first_key + key); }
};

// ---- by the engine
struct LaneBox {
  BoxPlace from;
  bool wanted;
};

// This lane's box of a block of keys.
inline LaneBox lane_box(const CachedKeys& keys, i32 n) {
  const i32 lane = lane_index(), first = n * kBlockKeys + lane * keys.args.box_rows;
  if (lane >= keys.args.boxes || first >= keys.clean.end || first + keys.args.box_rows <= keys.clean.begin)
    return {{0, 0, 0, 0}, false};
  const Slot at = keys.slot(first);
  return {{0, at.number, keys.kv_head, at.row}, true};
}

template <SmemTile tile>
inline void load_boxes(const Stages& stages, Ring& ring, const TensorMap& map, LaneBox box, i32 box_rows) {
  const u32 full = stages.full_barrier(ring), boxes = static_cast<u32>(__popc(__ballot_sync(~0u, box.wanted)));
  u32 to = stages.tile(ring) + static_cast<u32>(lane_index() * box_rows * kChunkBytes);
  wait_barrier(stages.empty_barrier(ring), ring.phase ^ 1);
  __syncwarp();  // without a box the stage is full at once, and may be free again before a late lane has seen that it was
  if (lane_index() == 0) arrive_expecting(full, boxes * static_cast<u32>(box_rows * tile.row_bytes));
  __syncwarp();
  if (box.wanted)
    for (int chunk = 0; chunk < tile.row_bytes / kChunkBytes; ++chunk, box.from.column += kChunkColumns)
      load_box(to + static_cast<u32>(chunk * tile.rows * kChunkBytes), map, full, box.from, kEvictLast);
  ring.next();
}

// By a warp, of K or of V: where the next boxes are is looked up while these are on their way.
template <SmemTile tile, bool of_keys>
inline void bring_boxes(const Shared& shared, const Stages& stages, const TileFacts* slots,
                        const CachedForwardArgs& args, const TensorMap& map) {
  prefetch_map(map);
  Ring ring;
  for (FactsReader reader{shared, slots};; ++reader.round) {
    const TileFacts& facts = reader.wait();
    if (!facts.exists) break;
    const CachedKeys keys(args, facts);
    __syncwarp();
    if (lane_index() == 0) reader.release();
    LaneBox box = lane_box(keys, keys.blocks.end - 1);
#pragma unroll 1
    for (i32 n = keys.blocks.end - 1; n >= keys.blocks.begin; --n) {
      if (of_keys && lane_index() == 0) want_next_tile(shared, keys.blocks, n);
      load_boxes<tile>(stages, ring, map, box, args.box_rows);
      if (n > keys.blocks.begin) box = lane_box(keys, n - 1);
    }
  }
}

// ---- row by row
// Where the row of a key begins; null: zeros take its place.
inline const char* cached_row(const CachedKeys& keys, const TensorArg& from, i32 key) {
  if (key < keys.clean.begin || keys.clean.end <= key) return nullptr;
  const Slot at = keys.slot(key);
  return from.data + static_cast<u32>(at.row) * from.strides[0] + static_cast<u32>(at.number) * from.strides[1] +
         static_cast<u32>(keys.kv_head) * from.strides[2];
}

// Rows `first` and further of a tile, 32 or as many as it has: lane l has the address of row first + l.
template <SmemTile tile> inline void gather_rows(u32 to, i32 first, const char* rows, const char* any, i32 bytes) {
  constexpr i32 kAtOnce = kWarp / 8;  // rows, of which 8 lanes take 128 bytes
  [[maybe_unused]] constexpr i32 kRowsAhead = tile.row_bytes > 256 ? 1 : kWarp / kAtOnce;  // else registers spill
  const i32 lane = lane_index(), byte = lane % 8 * kUnitBytes;
#pragma unroll kRowsAhead
  for (i32 below = 0; below < kWarp; below += kAtOnce) {
    if (tile.rows % kWarp != 0 && first + below >= tile.rows) break;
    const char* const row = from_lane(rows, below + lane / 8);
    const char* const from = (row == nullptr ? any : row) + byte;
    const UnitAddress<tile> unit(to, first + below + lane / 8, lane % 8);
#pragma unroll
    for (int at = 0; at < tile.row_bytes; at += kChunkBytes)
      copy_async<kUnitBytes>(unit.at(at / kUnitBytes, 0), from + at, row != nullptr && at + byte < bytes);
  }
}

// By a warp, of K or of V. Where the next rows are is looked up while these are on their way.
template <SmemTile tile, bool of_keys>
inline void bring_rows(const Shared& shared, const Stages& stages, const TileFacts* slots,
                       const CachedForwardArgs& args, const TensorArg& from, i32 columns) {
  Ring ring;
  for (FactsReader reader{shared, slots};; ++reader.round) {
    const TileFacts& facts = reader.wait();
    if (!facts.exists) break;
    const CachedKeys keys(args, facts);
    __syncwarp();
    if (lane_index() == 0) reader.release();
    const char* next = cached_row(keys, from, (keys.blocks.end - 1) * kBlockKeys + lane_index());
#pragma unroll 1
    for (i32 n = keys.blocks.end - 1; n >= keys.blocks.begin; --n) {
      if (of_keys && lane_index() == 0) want_next_tile(shared, keys.blocks, n);
      wait_barrier(stages.empty_barrier(ring), ring.phase ^ 1);
#pragma unroll 1
      for (i32 first = 0; first < kBlockKeys; first += kWarp) {
        const char* const rows = next;
        const i32 following = first + kWarp < kBlockKeys ? n * kBlockKeys + first + kWarp : (n - 1) * kBlockKeys;
        next = cached_row(keys, from, following + lane_index());
        gather_rows<tile>(stages.tile(ring), first, rows, from.data, columns * kElementBytes);
      }
      arrive_after_copies(stages.full_barrier(ring));
      ring.next();
    }
  }
}

// warp: of those that bring.
inline void bring_cached(const Shared& shared, const TileFacts* slots, const CachedForwardArgs& args, int warp) {
  if constexpr (kGathers) {
    if (warp == 1) bring_rows<kKeyStage, true>(shared, shared.keys(), slots, args, args.k, args.head_dim);
    if (warp == 3) bring_rows<kValueStage, false>(shared, shared.values(), slots, args, args.v, args.value_dim);
  } else {
    if (warp == 1) bring_boxes<kKeyStage, true>(shared, shared.keys(), slots, args, args.k_map);
    if (warp == 3) bring_boxes<kValueStage, false>(shared, shared.values(), slots, args, args.v_map);
  }
}

}  // namespace narrows
