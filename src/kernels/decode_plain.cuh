// Calls whose sequences may only differ in how many slots are filled. Where these lengths are about alike, every row of the line is
// cut into as many pieces, and a thread block finds its piece by its number; else blocks have stretches of the line as in
// decode_rows.cuh, which is for all other calls.
//
// In few instructions that wait for each other, since at small calls what comes before the first key takes as long as the keys. And
// each warp for itself: none waits for another until the end of a row.
#pragma once
#include "kernels/decode_block.cuh"

namespace narrows {

inline i32 plain_filled(const DecodeArgs& args, i32 s, bool early = false) {
  if (!args.cache_seqlens.data) return args.capacity;
  return at(args.cache_seqlens, s, early);
}
inline i32 plain_new_keys(const DecodeArgs& args) { return args.k_new.data ? args.new_rows : 0; }
inline i32 plain_tiles(i32 keys) { return static_cast<i32>((static_cast<u32>(keys) + kTileKeys - 1) / kTileKeys); }

// Of a row with so many slots filled; one without a key has a tile all the same (decode_line.h).
inline i32 plain_pieces(const DecodeArgs& args, i32 filled) {
  return max_of(plain_tiles(filled + plain_new_keys(args)), 1);
}

struct PlainLengths {
  i32 tiles, longest;
  bool fit;  // within what the call allows
  i32 own;   // of at most 32 sequences the one that the lane has looked at
};

inline bool plain_fits(const DecodeArgs& args, i32 filled) {
  return static_cast<u32>(filled) <= static_cast<u32>(args.plain_filled);
}

// Of all sequences, the same in every warp. first: what sequence 0 has filled.
inline PlainLengths plain_lengths(const DecodeArgs& args, i32 first, bool early) {
  const auto refused = [&](i32 s) { return !early && is_refused(args, s); };
  const i32 tiles = plain_pieces(args, first);
  if (args.batch == 1) return {tiles, tiles, plain_fits(args, first) && !refused(0), first};
  PlainLengths all{0, 0, true, 0};
#pragma unroll 1
  for (i32 s = static_cast<i32>(threadIdx.x % kWarp); s < args.batch; s += kWarp) {
    all.own = plain_filled(args, s, early);
    all.tiles += plain_pieces(args, all.own);
    all.longest = max_of(all.longest, plain_pieces(args, all.own));
    all.fit = all.fit && plain_fits(args, all.own) && !refused(s);
  }
  return {warp_sum(all.tiles), __reduce_max_sync(~0u, all.longest), __all_sync(~0u, all.fit) != 0, all.own};
}

// Of a warp that begins before the kernel ahead has ended: what it has done by lengths of at most 32 sequences stands if these are
// still the same then.
struct Ahead {
  bool waits;
  i32 own;  // of the lane's sequence

  // Ends the wait. What holds() is asked of: the loads after it need not wait for this one.
  i32 look_again(const DecodeArgs& args) {
    wait_for_previous();
    waits = false;
    const i32 s = min_of(static_cast<i32>(threadIdx.x % kWarp), args.batch - 1);
    return is_refused(args, s) ? -1 : plain_filled(args, s);
  }
  bool holds(const DecodeArgs& args, i32 found) const {
    return __all_sync(~0u, found == own || static_cast<i32>(threadIdx.x % kWarp) >= args.batch);
  }
};

// Row `row` of a sequence: the heads of `kv_head`, packed rows from first_row on.
struct PlainRow {
  i32 sequence, row;
  i32 kv_head, first_row, packed_rows;

  PlainRow(const DecodeArgs& args, i32 sequence_, i32 row_) : sequence(sequence_), row(row_) {
    const Quotient place = args.by_tile_rows.divide(row);
    kv_head = place.rest;
    first_row = place.quotient * kBlockQueries;
    packed_rows = min_of(args.query_rows * args.group - first_row, i32{kBlockQueries});
  }
};

// In shared memory, since the loop over keys needs every register; each warp its own.
struct PlainWork {
  Facts facts;
  i32 row;        // of its sequence
  i32 unit, end;  // of the line: the row's first, and behind the block's last
  Deal deal;
  Quotient place;  // the block's stretch of its line, and its line
};

// Where the line has sequences.
inline PlainWork& plain_work(LineSequence* room) {
  static_assert(sizeof(PlainWork) <= kWarp * sizeof(LineSequence));
  return *reinterpret_cast<PlainWork*>(room + threadIdx.x / kWarp * kWarp);
}

// What is known of the block's row without its length.
inline void gather_place(const DecodeArgs& args, PlainWork& work, const PlainRow& row) {
  __syncwarp();
  if (threadIdx.x % kWarp != 0) return;
  LineSequence& sequence = work.facts.sequence;
  sequence = {};
  sequence.sequence = sequence.row = row.sequence;
  sequence.queries = sequence.rows = args.query_rows;
  work.facts.kv_head = row.kv_head;
  work.facts.first_row = row.first_row;
  work.facts.packed_rows = row.packed_rows;
  work.row = row.row;
}

// Tiles [begin, end) of a row, which are its part number `part`.
struct PlainPart {
  i32 begin, end, part;
  PartSlots slots;
};

// Then the rest, perhaps again. Nothing but the diagonal limits what a row sees.
inline void gather_keys(const DecodeArgs& args, Facts& facts, const PlainRow& row, i32 filled, const PlainPart& part) {
  const i32 lane = static_cast<i32>(threadIdx.x % kWarp), keys = filled + plain_new_keys(args);
  const i32 shift = keys - args.query_rows, past = shift + args.by_group.quotient(row.first_row + lane) + 1;
  const Keys seen{0, args.visibility.right == 0 ? clamp_to(past, 0, keys) : keys};
  const Keys hull{0, __shfl_sync(~0u, seen.end, row.packed_rows - 1)}, common{0, __shfl_sync(~0u, seen.end, 0)};
  __syncwarp();
  if (lane < kBlockQueries) facts.seen[lane] = lane < row.packed_rows ? seen : Keys{0, 0};
  if (lane == 0) {
    facts.sequence.filled = filled;
    facts.sequence.keys = keys;
    facts.sequence.shift = shift;
    facts.begin = part.begin;
    facts.end = part.end;
    facts.part = part.part;
    facts.slots = part.slots;
    facts.hull = hull;
    facts.common = common;
    facts.first_tile = part.begin;
    facts.end_tile = min_of(part.end, plain_tiles(hull.end));
  }
  __syncwarp();
}

// ------------------------------------------------------------------------------------------------------- lengths alike

// Rows first, so that blocks read the heads of a token together.
struct PlainPiece {
  i32 part, number;  // of the row, in the line
  PlainRow row;

  explicit PlainPiece(const DecodeArgs& args) : PlainPiece(args, args.by_rows.divide(static_cast<i32>(blockIdx.x))) {}

 private:
  PlainPiece(const DecodeArgs& args, const Quotient& piece)
      : PlainPiece(args, piece, args.by_sequence_rows.divide(piece.rest)) {}
  PlainPiece(const DecodeArgs& args, const Quotient& piece, const Quotient& place)
      : part(piece.quotient), number(piece.rest), row(args, place.quotient, place.rest) {}
};

inline bool begin_piece(const DecodeArgs& args, const PlainPiece& piece, i32 filled, PlainWork& work) {
  const i32 splits = args.by_splits.divisor;
  if (piece.part >= splits) return false;
  const i32 tiles = args.by_splits.quotient(plain_pieces(args, filled) + splits - 1), begin = piece.part * tiles;
  gather_keys(args, work.facts, piece.row, filled,
              {begin, begin + tiles, piece.part, unit_slots(piece.number * splits, splits)});
  return true;
}

// ------------------------------------------------------------------------------------------------------ lengths differ
//
// There are `lines` lines, each with every so many rows of a sequence, which are dealt to as many blocks alike: blocks beside each
// other read the heads of a token together.

// The block's part of a row whose first unit is `unit`.
inline void gather_stretch(const DecodeArgs& args, PlainWork& work, const PlainRow& row, i32 filled, i32 unit,
                           const Deal& deal, const Quotient& place) {
  const i32 pieces = plain_pieces(args, filled), lines = args.by_lines.divisor;
  const i32 begin = max_of(deal.start(place.quotient) - unit, 0);
  const i32 end = min_of(deal.start(place.quotient + 1) - unit, pieces);
  const bool whole = begin == 0 && end == pieces;
  const PartSlots slots = whole ? PartSlots{1, 0, 0, 0} : stretch_slots(deal, unit, pieces, lines, place.rest);
  gather_place(args, work, row);
  if (threadIdx.x % kWarp == 0) work.unit = unit;
  const i32 part = whole ? 0 : place.quotient - deal.owner(unit);
  gather_keys(args, work.facts, row, filled, {begin, end, part, slots});
}

// The row of a unit: a warp looks at 32 sequences at a time. own: what the lane knows of the first ones.
inline void find_stretch(const DecodeArgs& args, PlainWork& work, const Deal& deal, const Quotient& place, i32 own) {
  const i32 lane = static_cast<i32>(threadIdx.x % kWarp), unit = deal.start(place.quotient);
  const i32 rows = args.line_rows, lines = args.by_lines.divisor;
#pragma unroll 1
  for (i32 first = 0, before = 0;; first += kWarp) {
    const bool exists = first + lane < args.batch;
    const i32 filled = !exists ? 0 : args.batch <= kWarp ? own : plain_filled(args, first + lane);
    const i32 units = exists ? plain_pieces(args, filled) + kEndingTiles : 0;
    const i32 end = before + sums_below(units * rows);
    const u32 past = __ballot_sync(~0u, end > unit);
    if (past != 0) {
      const int source = __ffs(static_cast<int>(past)) - 1;
      const i32 row_units = __shfl_sync(~0u, units, source), start = __shfl_sync(~0u, end - units * rows, source);
      const i32 row = static_cast<i32>(static_cast<u32>(unit - start) / static_cast<u32>(row_units));
      gather_stretch(args, work, PlainRow(args, first + source, row * lines + place.rest),
                     __shfl_sync(~0u, filled, source), start + row * row_units, deal, place);
      return;
    }
    before = __shfl_sync(~0u, end, kWarp - 1);
  }
}

inline bool begin_stretch(const DecodeArgs& args, const PlainLengths& lengths, PlainWork& work) {
  const Quotient place = args.by_lines.divide(static_cast<i32>(blockIdx.x));
  const i32 total = args.line_rows * (lengths.tiles + kEndingTiles * args.batch);
  const i32 blocks = args.by_lines.quotient(args.line_blocks);
  const Deal deal = deal_of(total, clamp_to(total / kLeastEvenTiles, 1, blocks));
  if (place.quotient >= deal.blocks) return false;
  if (threadIdx.x % kWarp == 0) {
    work.end = deal.start(place.quotient + 1);
    work.deal = deal;
    work.place = place;
  }
  find_stretch(args, work, deal, place, lengths.own);
  return true;
}

// How a block finds its rows.
enum class Way { unknown, line, stretch, piece, nothing };

inline Way begin_plain(const DecodeArgs& args, PlainWork& work, Ahead& ahead) {
  const PlainPiece piece(args);
  i32 filled = plain_filled(args, piece.row.sequence, ahead.waits);
  gather_place(args, work, piece.row);  // while its length is on its way
  const PlainLengths lengths = plain_lengths(args, filled, ahead.waits);
  if (ahead.waits) filled = __shfl_sync(~0u, lengths.own, piece.row.sequence);  // the one that is looked at again
  ahead.own = lengths.own;
  if (!lengths.fit) return Way::line;
  if (args.cuts_alike && are_alike(args.batch, lengths.tiles, lengths.longest))
    return begin_piece(args, piece, filled, work) ? Way::piece : Way::nothing;
  return begin_stretch(args, lengths, work) ? Way::stretch : Way::nothing;
}

// Whether the block has tiles of a plain call, so that it may ask for them as soon as the kernel ahead has ended.
inline bool has_tiles(Way way, const PlainWork& work) {
  return (way == Way::piece || way == Way::stretch) && work.facts.begin < work.facts.end &&
         work.facts.first_tile < work.facts.end_tile;
}

// The next row of the block's stretch, if it has one.
inline bool next_stretch(const DecodeArgs& args, PlainWork& work) {
  const CacheFacts& sequence = work.facts.sequence;
  const i32 unit = work.unit + plain_pieces(args, sequence.filled) + kEndingTiles;
  if (unit >= work.end) return false;
  const i32 beside = work.row + args.by_lines.divisor;
  const bool same = beside < args.by_sequence_rows.divisor;
  const i32 s = sequence.sequence + (same ? 0 : 1), filled = same ? sequence.filled : plain_filled(args, s);
  gather_stretch(args, work, PlainRow(args, s, same ? beside : work.place.rest), filled, unit, work.deal, work.place);
  return true;
}

}  // namespace narrows
