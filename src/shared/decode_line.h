// How the decode kernel shares its work out: a row is some query rows and query heads of one sequence that share a kv head, its
// work is tiles of keys. All rows stand in a line of units, a unit being some of a row's tiles, and thread blocks take equal
// stretches of the line. A row that several blocks have a part of leaves partial results, which the last of them joins.
//
// Lengths are the device's to know: every thread block computes the same line from them. Plain C++, tested on the host.
#pragma once
#include "shared/params.h"

namespace narrows {

// Tiles that ending a row costs as much time as, measured on an H200 (ragged batches: 3 to 7% of a call).
constexpr i32 kEndingTiles = 6;
constexpr i32 kLeastTiles = 4;      // of a piece that a row is cut into
constexpr i32 kLeastEvenTiles = 8;  // of a block, where the line is dealt evenly

// Of all sequences; `tiles` sums over rows, and `longest` is the most of one row.
struct LineTotals {
  i64 rows = 0, tiles = 0;
  i32 longest = 0;
};

// One rule for all rows. even: a unit is a tile, and blocks begin anywhere; else a row is `splits` units, or units of
// fixed_split tiles.
struct Cutting {
  i32 splits, fixed_split;
  bool even;

  // Rows in one piece: where they outnumber the blocks, these take every so many, and work on neighbours at the same time.
  constexpr bool whole_rows() const { return !even && splits == 1 && fixed_split == 0; }
};

// A row of so many tiles: `pieces` units of `tiles_of_piece`, then units that stand for its ending.
struct Cut {
  i32 pieces, tiles_of_piece, units;
};

// A row without a tile is a piece all the same: somebody must write its results.
constexpr Cut cut_of(const Cutting& cutting, i32 tiles) {
  const i32 some = max_of(tiles, 1);
  if (cutting.even) return {some, 1, some + kEndingTiles};
  if (cutting.fixed_split != 0) {
    const i32 pieces = ceil_div(some, cutting.fixed_split);
    return {pieces, cutting.fixed_split, pieces};
  }
  const i32 wanted = clamp_to(some / kLeastTiles, 1, cutting.splits), tiles_of_piece = ceil_div(some, wanted);
  const i32 pieces = ceil_div(some, tiles_of_piece);
  return {pieces, tiles_of_piece, pieces};
}

// asked: the call's num_splits; 0 leaves it to the rows. Rows of about one length are cut alike where that fills 9 blocks of 10
// in the last round; blocks that share no row are 20% faster at a batch of 1 than an even deal.
constexpr Cutting cutting_of(const LineTotals& totals, i32 blocks, i32 asked, i32 fixed_split) {
  if (fixed_split != 0) return {1, fixed_split, false};
  if (asked != 0) return {asked, 0, false};
  if (totals.rows == 0) return {1, 0, false};
  const i64 splits = max_of(blocks / totals.rows, i64{1});
  const i64 units = totals.rows * splits, rounds = ceil_div(units, i64{blocks});
  const bool alike = totals.rows * totals.longest <= totals.tiles + totals.tiles / 8;
  const bool full = 10 * units >= 9 * rounds * blocks;
  return {static_cast<i32>(splits), 0, !(alike && full)};
}

// Units 0 .. total - 1, in stretches that differ by one unit at most.
struct Deal {
  i64 total;
  i32 blocks;  // that have a stretch
  i64 least, longer;

  constexpr i64 start(i64 block) const { return block * least + min_of(block, longer); }
  constexpr i32 owner(i64 unit) const {
    const i64 before = longer * (least + 1);
    return static_cast<i32>(unit < before ? unit / (least + 1) : longer + (unit - before) / least);
  }
};

constexpr Deal deal_of(i64 total, i64 blocks) {
  const i64 used = clamp_to(total, i64{1}, blocks);
  return {total, static_cast<i32>(used), total / used, total % used};
}

// Where the parts of a row are: part j in slot j == 0 ? first : other + j * step.
struct PartSlots {
  i32 count;
  i64 first, other;
  i32 step;

  constexpr i64 slot(i32 part) const { return part == 0 ? first : other + i64{part} * step; }
};

// The slot that is this row's among those of the block which it begins in: at most two of a block's rows wait for other blocks,
// the one it begins with and the one it ends with.
constexpr i32 slot_of_row(const Deal& deal, i64 first_unit) {
  const i32 block = deal.owner(first_unit);
  return 2 * block + (deal.start(block) < first_unit ? 1 : 0);
}

// Of a row of `pieces` units from first_unit on.
constexpr PartSlots part_slots(const Deal& deal, i64 first_unit, i32 pieces) {
  const i32 from = deal.owner(first_unit), to = deal.owner(first_unit + pieces - 1);
  return {to - from + 1, slot_of_row(deal, first_unit), i64{2} * from, 2};
}

}  // namespace narrows
