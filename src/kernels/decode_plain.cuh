// Calls whose sequences may only differ in how many slots are filled. Where these lengths are about alike, every row of the line is
// cut into as many pieces, and a thread block finds its piece by its number. In few instructions that wait for each other: at
// small calls a walk through decode_rows.cuh takes longer than the keys.
#pragma once
#include "kernels/decode_block.cuh"

namespace narrows {

inline i32 plain_filled(const DecodeArgs& args, i32 s) {
  return args.cache_seqlens.data ? at(args.cache_seqlens, s) : args.capacity;
}
inline i32 plain_new_keys(const DecodeArgs& args) { return args.k_new.data ? args.new_rows : 0; }
inline i32 plain_tiles(i32 keys) { return static_cast<i32>((static_cast<u32>(keys) + kTileKeys - 1) / kTileKeys); }

// Whether they are. Every warp finds the same.
inline bool is_plain(const DecodeArgs& args) {
  if (args.plain_filled < 0) return false;
  i32 tiles = 0, longest = 0;
  bool fits = true;
#pragma unroll 1
  for (i32 s = static_cast<i32>(threadIdx.x % kWarp); s < args.batch; s += kWarp) {
    const i32 filled = plain_filled(args, s), own = plain_tiles(filled + plain_new_keys(args));
    fits &= static_cast<u32>(filled) <= static_cast<u32>(args.plain_filled) && !is_refused(args, s);
    tiles += own;
    longest = max_of(longest, own);
  }
  longest = __reduce_max_sync(~0u, longest);
  return __all_sync(~0u, fits) && are_alike(args.batch, warp_sum(tiles), longest);
}

// What packed row r of a tile sees: nothing but the diagonal limits it.
inline Keys plain_keys(const DecodeArgs& args, i32 keys, i32 first_row, i32 r) {
  const i32 past = keys - args.query_rows + args.by_group.quotient(first_row + r) + 1;
  return {0, args.visibility.right == 0 ? clamp_to(past, 0, keys) : keys};
}

// Of the thread block. Rows first, so that blocks read the heads of a token together.
struct PlainPiece {
  i32 part, row, sequence, kv_head;
  i32 first_row, packed_rows;  // Facts
  i32 filled;

  explicit PlainPiece(const DecodeArgs& args) {
    const Quotient piece = args.by_rows.divide(static_cast<i32>(blockIdx.x));
    const Quotient of_sequence = args.by_sequence_rows.divide(piece.rest);
    const Quotient of_tile = args.by_tile_rows.divide(of_sequence.rest);
    part = piece.quotient;
    row = piece.rest;
    sequence = of_sequence.quotient;
    filled = plain_filled(args, sequence);
    kv_head = of_tile.rest;
    first_row = of_tile.quotient * kBlockQueries;
    packed_rows = min_of(args.query_rows * args.group - first_row, i32{kBlockQueries});
  }

  i32 keys(const DecodeArgs& args) const { return filled + plain_new_keys(args); }

  Reach reach(const DecodeArgs& args) const {
    const i32 all = keys(args), tiles = args.by_splits.quotient(plain_tiles(all) + args.by_splits.divisor - 1);
    const Keys hull = plain_keys(args, all, first_row, packed_rows - 1);
    const i32 first_tile = part * tiles;
    return {sequence,
            0,
            args.query_rows,
            kv_head,
            first_row,
            packed_rows,
            sequence,
            0,
            hull,
            first_tile,
            min_of(first_tile + tiles, plain_tiles(hull.end))};
  }
};

// Each warp has its own, so that none waits for another; where the line has sequences.
inline Facts& plain_facts(LineSequence* room) {
  static_assert(sizeof(Facts) <= kWarp * sizeof(LineSequence));
  return *reinterpret_cast<Facts*>(room + threadIdx.x / kWarp * kWarp);
}

inline void gather_plain(const DecodeArgs& args, Facts& facts, const PlainPiece& piece, const Reach& reach) {
  const i32 lane = static_cast<i32>(threadIdx.x % kWarp), keys = piece.keys(args), splits = args.by_splits.divisor;
  if (lane < kBlockQueries)
    facts.seen[lane] = lane < piece.packed_rows ? plain_keys(args, keys, piece.first_row, lane) : Keys{0, 0};
  if (lane == 0) {
    LineSequence& sequence = facts.sequence;
    sequence = {};
    sequence.sequence = sequence.row = piece.sequence;
    sequence.filled = piece.filled;
    sequence.keys = keys;
    sequence.queries = sequence.rows = args.query_rows;
    sequence.shift = keys - args.query_rows;
    facts.kv_head = piece.kv_head;
    facts.begin = facts.part = piece.part;
    facts.end = piece.part + 1;
    facts.slots = unit_slots(piece.row * splits, splits);
    facts.first_row = piece.first_row;
    facts.packed_rows = piece.packed_rows;
    facts.hull = reach.hull;
    facts.common = plain_keys(args, keys, piece.first_row, 0);
    facts.first_tile = reach.first_tile;
    facts.end_tile = reach.end_tile;
  }
  __syncwarp();
}

}  // namespace narrows
