// Calls whose sequences may only differ in how many slots are filled. Where these lengths are about alike, every row of the line is
// cut into as many pieces, and a thread block finds its piece by its number; else blocks have stretches of the line as in
// decode_rows.cuh, which is for all other calls.
//
// In few instructions that wait for each other, since at small calls what comes before the first key takes as long as the keys. And
// each warp for itself: none waits for another until the end of a row.
#pragma once
#include "kernels/decode_block.cuh"

namespace narrows {

inline i32 plain_filled(const DecodeArgs& args, i32 s) {
  return args.cache_seqlens.data ? at(args.cache_seqlens, s) : args.capacity;
}
inline i32 plain_new_keys(const DecodeArgs& args) { return args.k_new.data ? args.new_rows : 0; }
inline i32 plain_tiles(i32 keys) { return static_cast<i32>((static_cast<u32>(keys) + kTileKeys - 1) / kTileKeys); }

// Of a row with so many slots filled; one without a key has a tile all the same (decode_line.h).
inline i32 plain_pieces(const DecodeArgs& args, i32 filled) {
  return max_of(plain_tiles(filled + plain_new_keys(args)), 1);
}

// Of all sequences. The same in every warp.
struct PlainLengths {
  i32 tiles = 0, longest = 0;
  bool fit = true;  // within what the call allows

  explicit PlainLengths(const DecodeArgs& args) {
#pragma unroll 1
    for (i32 s = static_cast<i32>(threadIdx.x % kWarp); s < args.batch; s += kWarp) {
      const i32 filled = plain_filled(args, s), own = plain_pieces(args, filled);
      fit &= static_cast<u32>(filled) <= static_cast<u32>(args.plain_filled) && !is_refused(args, s);
      tiles += own;
      longest = max_of(longest, own);
    }
    fit = __all_sync(~0u, fit);
    tiles = warp_sum(tiles);
    longest = __reduce_max_sync(~0u, longest);
  }
};

// Row `row` of a sequence.
struct PlainRow {
  i32 sequence, row, filled;
};

// In shared memory, since the loop over keys needs every register; each warp its own.
struct PlainWork {
  Facts facts;
  i32 row;        // of its sequence
  i32 unit, end;  // of the line: the row's first, and behind the block's last
  Deal deal;
};

// Where the line has sequences.
inline PlainWork& plain_work(LineSequence* room) {
  static_assert(sizeof(PlainWork) <= kWarp * sizeof(LineSequence));
  return *reinterpret_cast<PlainWork*>(room + threadIdx.x / kWarp * kWarp);
}

// What packed row r of a tile sees: nothing but the diagonal limits it.
inline Keys plain_keys(const DecodeArgs& args, i32 keys, i32 first_row, i32 r) {
  const i32 past = keys - args.query_rows + args.by_group.quotient(first_row + r) + 1;
  return {0, args.visibility.right == 0 ? clamp_to(past, 0, keys) : keys};
}

// Tiles [begin, end) of a row, which are its part number `part`.
struct PlainPart {
  i32 begin, end, part;
  PartSlots slots;
};

inline void gather_plain(const DecodeArgs& args, Facts& facts, const PlainRow& row, const PlainPart& part) {
  const i32 lane = static_cast<i32>(threadIdx.x % kWarp), keys = row.filled + plain_new_keys(args);
  const auto [tile, kv_head] = args.by_tile_rows.divide(row.row);
  const i32 first_row = tile * kBlockQueries;
  const i32 packed_rows = min_of(args.query_rows * args.group - first_row, i32{kBlockQueries});
  __syncwarp();
  if (lane < kBlockQueries)
    facts.seen[lane] = lane < packed_rows ? plain_keys(args, keys, first_row, lane) : Keys{0, 0};
  if (lane == 0) {
    LineSequence& sequence = facts.sequence;
    sequence = {};
    sequence.sequence = sequence.row = row.sequence;
    sequence.filled = row.filled;
    sequence.keys = keys;
    sequence.queries = sequence.rows = args.query_rows;
    sequence.shift = keys - args.query_rows;
    facts.kv_head = kv_head;
    facts.begin = part.begin;
    facts.end = part.end;
    facts.part = part.part;
    facts.slots = part.slots;
    facts.first_row = first_row;
    facts.packed_rows = packed_rows;
    facts.hull = plain_keys(args, keys, first_row, packed_rows - 1);
    facts.common = plain_keys(args, keys, first_row, 0);
    facts.first_tile = part.begin;
    facts.end_tile = min_of(part.end, plain_tiles(facts.hull.end));
  }
  __syncwarp();
}

// ------------------------------------------------------------------------------------------------------- lengths alike

// Rows first, so that blocks read the heads of a token together.
struct PlainPiece {
  i32 part, number;  // of the row
  PlainRow row;

  explicit PlainPiece(const DecodeArgs& args) {
    const Quotient piece = args.by_rows.divide(static_cast<i32>(blockIdx.x));
    const Quotient place = args.by_sequence_rows.divide(piece.rest);
    part = piece.quotient;
    number = piece.rest;
    row = {place.quotient, place.rest, plain_filled(args, place.quotient)};
  }
};

inline bool begin_piece(const DecodeArgs& args, const PlainPiece& piece, PlainWork& work) {
  const i32 splits = args.by_splits.divisor;
  if (piece.part >= splits) return false;
  const i32 tiles = args.by_splits.quotient(plain_pieces(args, piece.row.filled) + splits - 1),
            begin = piece.part * tiles;
  gather_plain(args, work.facts, piece.row,
               {begin, begin + tiles, piece.part, unit_slots(piece.number * splits, splits)});
  return true;
}

// ------------------------------------------------------------------------------------------------------ lengths differ

// The block's part of the row whose first unit is work.unit.
inline void gather_stretch(const DecodeArgs& args, PlainWork& work, const PlainRow& row, i32 unit, const Deal& deal) {
  const i32 block = static_cast<i32>(blockIdx.x), pieces = plain_pieces(args, row.filled);
  const i32 begin = max_of(deal.start(block) - unit, 0), end = min_of(deal.start(block + 1) - unit, pieces);
  const bool whole = begin == 0 && end == pieces;
  const PartSlots slots = whole ? PartSlots{1, 0, 0, 0} : stretch_slots(deal, unit, pieces);
  gather_plain(args, work.facts, row, {begin, end, whole ? 0 : block - slots.other / 2, slots});
  if (threadIdx.x % kWarp != 0) return;
  work.row = row.row;
  work.unit = unit;
}

// The row of a unit: a warp looks at 32 sequences at a time.
inline void find_stretch(const DecodeArgs& args, PlainWork& work, i32 unit, const Deal& deal) {
  const i32 lane = static_cast<i32>(threadIdx.x % kWarp), rows = args.by_sequence_rows.divisor;
#pragma unroll 1
  for (i32 first = 0, before = 0;; first += kWarp) {
    const bool exists = first + lane < args.batch;
    const i32 filled = exists ? plain_filled(args, first + lane) : 0;
    const i32 units = exists ? plain_pieces(args, filled) + kEndingTiles : 0, end = before + sums_below(units * rows);
    const u32 past = __ballot_sync(~0u, end > unit);
    if (past != 0) {
      const int source = __ffs(static_cast<int>(past)) - 1;
      const i32 row_units = __shfl_sync(~0u, units, source), start = __shfl_sync(~0u, end - units * rows, source);
      const i32 row = static_cast<i32>(static_cast<u32>(unit - start) / static_cast<u32>(row_units));
      return gather_stretch(args, work, {first + source, row, __shfl_sync(~0u, filled, source)},
                            start + row * row_units, deal);
    }
    before = __shfl_sync(~0u, end, kWarp - 1);
  }
}

inline bool begin_stretch(const DecodeArgs& args, const PlainLengths& lengths, PlainWork& work) {
  const i32 total = args.by_sequence_rows.divisor * (lengths.tiles + kEndingTiles * args.batch);
  const Deal deal = deal_of(total, clamp_to(total / kLeastEvenTiles, 1, args.line_blocks));
  const i32 block = static_cast<i32>(blockIdx.x);
  if (block >= deal.blocks) return false;
  find_stretch(args, work, deal.start(block), deal);
  if (threadIdx.x % kWarp == 0) {
    work.end = deal.start(block + 1);
    work.deal = deal;
  }
  return true;
}

// The next row of the block's stretch, if it has one.
inline bool next_stretch(const DecodeArgs& args, PlainWork& work) {
  __syncwarp();
  const CacheFacts& sequence = work.facts.sequence;
  const i32 unit = work.unit + plain_pieces(args, sequence.filled) + kEndingTiles;
  if (unit >= work.end) return false;
  PlainRow row{sequence.sequence, work.row + 1, sequence.filled};
  if (row.row == args.by_sequence_rows.divisor) row = {row.sequence + 1, 0, plain_filled(args, row.sequence + 1)};
  gather_stretch(args, work, row, unit, work.deal);
  return true;
}

}  // namespace narrows
