// How the decode kernel shares its work out: a row is some query rows and query heads of one sequence that share a kv head, its
// work is tiles of keys. All rows stand in a line of units, a unit being some of a row's tiles. Thread blocks take equal
// stretches of the line, or every so many units. A row that several blocks have a part of leaves partial results, which the last
// of them joins.
//
// Lengths are the device's to know: every thread block computes the same line from them. Plain C++, tested on the host.
#pragma once
#include "shared/params.h"

namespace narrows {

// Tiles that ending a row costs as much time as, measured on an H200 (ragged batches: 3 to 7% of a call).
constexpr i32 kEndingTiles = 6;
constexpr i32 kLeastTiles = 4;      // of a piece that a row is cut into
constexpr i32 kLeastEvenTiles = 8;  // of a block, where the line is dealt evenly

// Of all sequences; `tiles` and `pieces` sum over rows, and `longest` is the most tiles of one row.
struct LineTotals {
  i32 rows, tiles;
  i32 pieces;  // of fixed_split tiles
  i32 longest;
};

// One rule for all rows. even: a unit is a tile, and blocks take stretches; else a row is `splits` units, or units of
// fixed_split tiles, and blocks take every so many, so that they work on neighbours at the same time.
struct Cutting {
  i32 splits, fixed_split;
  bool even;
};

// A row of so many tiles: `pieces` units of `tiles_of_piece`, of which the last may be empty, then units that stand for its
// ending.
struct Cut {
  i32 pieces, tiles_of_piece, units;
};

// A row without a tile is a piece all the same: somebody must write its results.
constexpr Cut cut_of(const Cutting& cutting, i32 tiles) {
  const i32 some = max_of(tiles, 1);
  if (cutting.even) return {some, 1, some + kEndingTiles};
  if (cutting.fixed_split == 0) return {cutting.splits, ceil_div(some, cutting.splits), cutting.splits};
  const i32 pieces = ceil_div(some, cutting.fixed_split);
  return {pieces, cutting.fixed_split, pieces};
}

// Of rows that the blocks could have more than one piece of.
constexpr i32 most_splits(i32 rows, i32 blocks) { return max_of(blocks / max_of(rows, 1), 1); }

// Whether so many pieces of equal work fill 9 blocks of 10 in the last round.
constexpr bool fills(i32 pieces, i32 blocks) { return i64{10} * pieces >= i64{9} * ceil_div(pieces, blocks) * blocks; }

// 19 of 20: 360 pieces on 396 blocks are 2% slower than stretches on 264.
constexpr bool nearly_fills(i32 pieces, i32 blocks) {
  return i64{20} * pieces >= i64{19} * ceil_div(pieces, blocks) * blocks;
}

// Whether rows of about one length are better cut into so many equal pieces than dealt evenly: 320 on 396 blocks are 12% faster.
constexpr bool cut_alike(i32 pieces, i32 blocks) {
  return i64{5} * pieces >= i64{4} * ceil_div(pieces, blocks) * blocks;
}

// The same of pieces with a thread block each, where some blocks of a multiprocessor may be without: they go to all
// multiprocessors before one gets a second. Stretches of a plain call (decode_plain.cuh) cost less than those cutting_of weighs.
constexpr bool spread_evenly(i32 pieces, i32 blocks, i32 resident_blocks) {
  return fills(pieces, pieces <= blocks ? blocks / resident_blocks : blocks);
}

// Rows of about one length. No product or sum of tiles reaches 2^31.
constexpr bool are_alike(i32 count, i32 tiles, i32 longest) {
  return static_cast<u32>(count) * static_cast<u32>(longest) <= static_cast<u32>(tiles) + static_cast<u32>(tiles) / 8;
}

constexpr i32 splits_of(i32 longest, i32 wanted) { return clamp_to(longest / kLeastTiles, 1, wanted); }

// asked: the call's num_splits; 0 leaves it to the rows. Rows that are alike are cut alike where that fills the machine; blocks
// that share no row are 20% faster at a batch of 1 than an even deal.
constexpr Cutting cutting_of(const LineTotals& totals, i32 blocks, i32 asked, i32 fixed_split) {
  if (fixed_split != 0) return {1, fixed_split, false};
  if (asked != 0) return {asked, 0, false};
  const i32 wanted = most_splits(totals.rows, blocks), splits = splits_of(totals.longest, wanted);
  const bool full = splits < wanted || cut_alike(totals.rows * splits, blocks);
  return {splits, 0, !(full && are_alike(totals.rows, totals.tiles, totals.longest))};
}

constexpr i32 units_of(const LineTotals& totals, const Cutting& cutting) {
  if (cutting.even) return totals.tiles + kEndingTiles * totals.rows;
  return cutting.fixed_split != 0 ? totals.pieces : totals.rows * cutting.splits;
}

// Units 0 .. total - 1, in stretches that differ by one unit at most.
struct Deal {
  i32 blocks;  // that have a stretch
  i32 least, longer;

  constexpr i32 start(i32 block) const { return block * least + min_of(block, longer); }
  constexpr i32 owner(i32 unit) const {
    const i32 before = longer * (least + 1), past = unit - before;
    const i32 size = past < 0 ? least + 1 : least;
    return (past < 0 ? 0 : longer) + (past < 0 ? unit : past) / size;
  }
};

constexpr Deal deal_of(i32 total, i32 blocks) {
  const i32 used = clamp_to(total, 1, blocks);
  return {used, total / used, total % used};
}

// Where the parts of a row are: part j in slot j == 0 ? first : other + j * step.
struct PartSlots {
  i32 count;
  i32 first, other, step;

  constexpr i32 slot(i32 part) const { return part == 0 ? first : other + part * step; }
};

// Of a row of `pieces` units from first_unit on, where blocks take stretches. At most two of a block's rows wait for others: one
// that it goes on with, and one that it begins and does not end. Of `lines` lines that are dealt alike this is number `line`: block n of
// its deal is the call's block n * lines + line.
constexpr PartSlots stretch_slots(const Deal& deal, i32 first_unit, i32 pieces, i32 lines = 1, i32 line = 0) {
  const i32 from = deal.owner(first_unit), to = deal.owner(first_unit + pieces - 1), other = 2 * (from * lines + line);
  return {to - from + 1, other + 1, other, 2 * lines};
}

// Every unit is a part.
constexpr PartSlots unit_slots(i32 first_unit, i32 pieces) { return {pieces, first_unit, first_unit, 1}; }

}  // namespace narrows
