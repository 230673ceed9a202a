// The line of a decode call's work: every tile of every row is some thread block's, once, and parts of rows do not share slots.
#include "shared/decode_line.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace narrows {
namespace {

struct Line {
  std::vector<i32> tiles;  // of each row
  i32 blocks = 1, asked = 0, fixed_split = 0;

  LineTotals totals() const {
    LineTotals sums{};
    for (const i32 row : tiles) {
      sums.rows += 1;
      sums.tiles += max_of(row, 1);
      if (fixed_split) sums.pieces += ceil_div(max_of(row, 1), fixed_split);
      sums.longest = max_of(sums.longest, row);
    }
    return sums;
  }
  Cutting cutting() const { return cutting_of(totals(), blocks, asked, fixed_split); }
};

/// Units [begin, end) of a row, and which of its parts that is.
struct Share {
  i32 row, first, begin, end, part;
  Cut cut;
  PartSlots slots;
};

/// As kernels/decode_rows.cuh walks along the line.
std::vector<Share> shares_of(const Line& line, i32 block) {
  const Cutting cutting = line.cutting();
  const i32 units = units_of(line.totals(), cutting);
  const Deal deal = deal_of(units, cutting.even ? clamp_to(units / kLeastEvenTiles, 1, line.blocks) : line.blocks);
  i32 unit = block, end = units;
  if (cutting.even) unit = block < deal.blocks ? deal.start(block) : units;
  if (cutting.even) end = block < deal.blocks ? deal.start(block + 1) : units;
  std::vector<Share> shares;
  i32 first = 0;
  for (i32 row = 0; row < static_cast<i32>(line.tiles.size()) && unit < end; ++row) {
    const Cut cut = cut_of(cutting, line.tiles[static_cast<std::size_t>(row)]);
    while (unit < end && unit < first + cut.units) {
      Share share{row, first, unit - first, unit - first + 1, unit - first, cut, unit_slots(first, cut.pieces)};
      unit += line.blocks;
      if (cutting.even) {
        share.end = min_of(cut.pieces, end - first);
        share.slots = stretch_slots(deal, first, cut.pieces);
        share.part = block - share.slots.other / 2;
        unit = first + cut.units;
      }
      if (share.begin < share.end) shares.push_back(share);
    }
    first += cut.units;
  }
  return shares;
}

void expect_whole(const Line& line) {
  std::vector<std::vector<int>> seen;
  for (const i32 tiles : line.tiles) seen.emplace_back(static_cast<std::size_t>(max_of(tiles, 1)), 0);
  std::map<i32, std::set<i32>> parts;          // of each row
  std::map<i32, std::pair<i32, i32>> slot_of;  // a slot's row and part
  std::map<i32, i32> counts;
  for (i32 block = 0; block < line.blocks; ++block)
    for (const Share& share : shares_of(line, block)) {
      ASSERT_TRUE(parts[share.row].insert(share.part).second) << "row " << share.row << " part " << share.part;
      counts[share.row] = share.slots.count;
      if (share.slots.count > 1) {
        const auto [place, fresh] = slot_of.try_emplace(share.slots.slot(share.part), share.row, share.part);
        ASSERT_TRUE(fresh) << "slot " << place->first;
      }
      auto& row = seen[static_cast<std::size_t>(share.row)];
      const i32 size = share.cut.tiles_of_piece;
      for (i32 tile = share.begin * size; tile < min_of(share.end * size, static_cast<i32>(row.size())); ++tile)
        ++row[static_cast<std::size_t>(tile)];
    }
  for (std::size_t row = 0; row < seen.size(); ++row) {
    for (const int times : seen[row]) ASSERT_EQ(times, 1) << "row " << row << " of " << line.tiles[row];
    const i32 key = static_cast<i32>(row);
    ASSERT_EQ(static_cast<i32>(parts[key].size()), counts[key]) << "row " << row;
    ASSERT_EQ(*parts[key].rbegin(), counts[key] - 1) << "row " << row;
  }
  if (line.cutting().even && !slot_of.empty()) {
    EXPECT_LT(slot_of.rbegin()->first, 2 * line.blocks);
  }
}

TEST(DecodeLine, every_tile_once_and_every_part_a_slot_of_its_own) {
  std::mt19937 random(7);
  const auto below = [&](i32 limit) { return static_cast<i32>(random() % static_cast<unsigned>(limit)); };
  int evens = 0;
  for (int repeat = 0; repeat < 1000; ++repeat) {
    Line line;
    line.blocks = 1 + below(repeat % 3 == 0 ? 400 : 40);
    if (repeat % 5 == 1) line.asked = 1 + below(20);
    if (repeat % 5 == 2) line.fixed_split = 1 + below(32);
    const i32 rows = 1 + below(60), longest = 1 + below(300), alike = below(2);
    for (i32 row = 0; row < rows; ++row) line.tiles.push_back(alike ? longest : below(longest + 1));
    evens += line.cutting().even;
    SCOPED_TRACE(repeat);
    ASSERT_NO_FATAL_FAILURE(expect_whole(line));
  }
  EXPECT_GT(evens, 100);
}

TEST(DecodeLine, rows_alike_that_fill_the_machine_are_cut_alike) {
  const auto cutting = [](i32 rows, i32 tiles, i32 blocks) {
    return Line{std::vector<i32>(static_cast<std::size_t>(rows), tiles), blocks}.cutting();
  };
  EXPECT_EQ(cutting(8, 512, 132).splits, 16);
  EXPECT_FALSE(cutting(8, 512, 132).even);
  EXPECT_EQ(cutting(8, 8, 132).splits, 2) << "pieces of 4 tiles at least";
  EXPECT_FALSE(cutting(8, 8, 132).even);
  EXPECT_TRUE(cutting(72, 512, 132).even) << "one piece of each row leaves 60 blocks idle";
  EXPECT_EQ(cutting(160, 256, 396).splits, 2);
  EXPECT_FALSE(cutting(160, 256, 396).even) << "76 blocks idle cost less than rows that two blocks share";
  EXPECT_EQ(cutting(1024, 512, 264).splits, 1);
  EXPECT_FALSE(cutting(1024, 512, 264).even);
  EXPECT_TRUE((Line{{512, 16, 16, 16}, 132}.cutting().even)) << "lengths far apart";
  EXPECT_EQ((Line{{512, 16}, 132, 7}.cutting().splits), 7);
  EXPECT_EQ((Line{{512, 16}, 132, 7, 32}.cutting().fixed_split), 32) << "batch_invariant before num_splits";
}

TEST(DecodeLine, pieces_that_nearly_fill_the_last_round) {
  EXPECT_TRUE(nearly_fills(384, 396));
  EXPECT_FALSE(nearly_fills(360, 396));
  EXPECT_TRUE(nearly_fills(1152, 396)) << "3 rounds";
  EXPECT_FALSE(nearly_fills(400, 396));
}

TEST(DecodeLine, pieces_with_a_block_each_are_spread_over_multiprocessors) {
  EXPECT_TRUE(spread_evenly(256, 396, 3)) << "two blocks of 132 multiprocessors, of the three that they could have";
  EXPECT_FALSE(spread_evenly(320, 396, 3)) << "56 multiprocessors have half as much again as the others";
  EXPECT_TRUE(spread_evenly(360, 396, 3));
  EXPECT_FALSE(spread_evenly(300, 396, 3)) << "96 multiprocessors have two thirds of the others' work";
  EXPECT_TRUE(spread_evenly(1024, 264, 2));
  EXPECT_FALSE(spread_evenly(400, 396, 3)) << "4 pieces after all others";
  EXPECT_TRUE(spread_evenly(128, 132, 1));
}

TEST(DecodeLine, stretches_differ_by_one_unit) {
  for (i32 total = 1; total < 200; ++total)
    for (i32 blocks = 1; blocks < 40; ++blocks) {
      const Deal deal = deal_of(total, blocks);
      ASSERT_EQ(deal.start(deal.blocks), total);
      for (i32 block = 0; block < deal.blocks; ++block) {
        const i32 size = deal.start(block + 1) - deal.start(block);
        ASSERT_TRUE(size == total / deal.blocks || size == total / deal.blocks + 1);
        for (i32 unit = deal.start(block); unit < deal.start(block + 1); ++unit) ASSERT_EQ(deal.owner(unit), block);
      }
    }
}

/// Blocks of lines that are dealt alike keep their parts apart, and a row's where the block of its number looks for them.
TEST(DecodeLine, slots_of_several_lines) {
  const Deal deal = deal_of(100, 7);
  for (const i32 lines : {1, 8}) {
    std::set<i32> slots;
    for (i32 line = 0; line < lines; ++line) {
      const PartSlots parts = stretch_slots(deal, 20, 60, lines, line);
      ASSERT_EQ(parts.count, deal.owner(79) - deal.owner(20) + 1);
      for (i32 part = 0; part < parts.count; ++part) {
        const i32 block = (deal.owner(20) + part) * lines + line;
        EXPECT_EQ(parts.slot(part), 2 * block + (part == 0 ? 1 : 0));
        EXPECT_TRUE(slots.insert(parts.slot(part)).second);
      }
    }
  }
}

TEST(DecodeLine, a_row_without_tiles_is_somebodys_and_no_row_is_nobodys) {
  expect_whole({{0}, 132});
  expect_whole({{0, 0, 0}, 2, 4});
  expect_whole({{0, 0, 0}, 2, 0, 32});
  for (i32 block = 0; block < 3; ++block) EXPECT_TRUE(shares_of({{}, 3}, block).empty());
}

}  // namespace
}  // namespace narrows
