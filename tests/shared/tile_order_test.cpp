// Which rows and which head a thread block takes: all of them, each once.
#include "shared/tile_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace narrows {
namespace {

TEST(TileOrder, every_block_of_every_pair_once) {
  std::mt19937 random(3);
  const auto up_to = [&](u32 most) { return std::uniform_int_distribution<u32>(1, most)(random); };
  for (int repeat = 0; repeat < 3000; ++repeat) {
    const u32 blocks = up_to(repeat % 2 == 0 ? 40 : 3), pairs = up_to(repeat % 3 == 0 ? 5 : 60);
    const u32 section = repeat % 5 == 0 ? pairs : up_to(pairs);
    SCOPED_TRACE(testing::Message() << blocks << " blocks, " << pairs << " pairs, section " << section);
    std::vector<int> seen(blocks * pairs, 0);
    for (u32 index = 0; index < blocks * pairs; ++index) {
      const TileNumber tile = tile_number(index, blocks, pairs, section);
      ASSERT_GE(tile.block, 0);
      ASSERT_LT(static_cast<u32>(tile.block), blocks);
      ASSERT_GE(tile.pair, 0);
      ASSERT_LT(static_cast<u32>(tile.pair), pairs);
      ++seen[static_cast<u32>(tile.block) * pairs + static_cast<u32>(tile.pair)];
    }
    ASSERT_EQ(std::count(seen.begin(), seen.end(), 1), static_cast<std::ptrdiff_t>(seen.size()));
  }
}

TEST(TileOrder, pairs_of_a_section_are_worked_on_together_and_their_last_blocks_first) {
  i32 last_section = 0, last_block = 3;
  for (u32 index = 0; index < 4 * 10; ++index) {
    const TileNumber tile = tile_number(index, 4, 10, 3);
    const i32 section = tile.pair / 3;
    EXPECT_TRUE((section == last_section && tile.block <= last_block) ||
                (section == last_section + 1 && tile.block == 3 && last_block == 0))
        << index;
    last_section = section;
    last_block = tile.block;
  }
  EXPECT_EQ(last_section, 3);
}

/// The number that tile_number maps to a tile, found backwards.
u32 index_of(const TileNumber& tile, u32 blocks, u32 pairs, u32 section) {
  const u32 pair = static_cast<u32>(tile.pair), number = pair / section;
  const u32 width = std::min(section, pairs - number * section);
  return number * section * blocks + (blocks - 1 - static_cast<u32>(tile.block)) * width + pair % section;
}

TEST(TileOrder, the_largest_grids_wrap_nowhere) {
  struct Grid {
    u32 blocks, pairs, section;
  };
  constexpr u32 kMost = 2147482623;  // the planner's limit
  std::mt19937 random(5);
  for (const Grid& grid :
       {Grid{kMost, 1, 1}, Grid{1, kMost, 1}, Grid{1, kMost, kMost}, Grid{46340, 46341, 1}, Grid{46340, 46341, 46341},
        Grid{46340, 46341, 46340}, Grid{3, 715827541, 65536}, Grid{16777216, 127, 100}}) {
    const u32 all = grid.blocks * grid.pairs;
    ASSERT_LE(u64{grid.blocks} * grid.pairs, kMost);
    std::vector<u32> indices{0, 1, all / 2, all - 1, grid.section * grid.blocks - 1};
    std::uniform_int_distribution<u32> any(0, all - 1);
    for (int i = 0; i < 20000; ++i) indices.push_back(any(random));
    for (const u32 index : indices) {
      const TileNumber tile = tile_number(index, grid.blocks, grid.pairs, grid.section);
      ASSERT_LT(static_cast<u32>(tile.block), grid.blocks);
      ASSERT_LT(static_cast<u32>(tile.pair), grid.pairs);
      ASSERT_EQ(index_of(tile, grid.blocks, grid.pairs, grid.section), index);
    }
  }
}

/// The rows of each sequence and then the tensor's rows behind the last one, as the kernel cuts them into blocks.
void expect_blocks(const std::vector<i64>& lengths, i32 rows_of_block) {
  i64 rows = 0;
  for (const i64 length : lengths) rows += length;
  const i32 sequences = static_cast<i32>(lengths.size()) - 1;  // the last length is of rows in no sequence
  const i64 count = block_count(rows, sequences, rows_of_block);
  i64 begin = 0, free = 0;  // free: the first block that no sequence before has
  for (i32 s = 0; s <= sequences; ++s) {
    const i64 end = begin + lengths[static_cast<std::size_t>(s)];
    const i64 first = first_block(begin, s, rows_of_block), next = first_block(end, s + 1, rows_of_block);
    ASSERT_GE(first, free) << "sequence " << s;
    ASSERT_GE((next - first) * rows_of_block, end - begin) << "sequence " << s;
    ASSERT_LT(first + (end - begin - 1) / rows_of_block, count + (end == begin ? 1 : 0)) << "sequence " << s;
    free = next;
    begin = end;
  }
  // Few blocks are without rows: less than one for each sequence and one more.
  ASSERT_LE(count, rows / rows_of_block + sequences + 1);
}

TEST(TileOrder, varlen_blocks_belong_to_one_sequence_and_hold_all_its_rows) {
  std::mt19937 random(9);
  for (int repeat = 0; repeat < 20000; ++repeat) {
    const i32 rows_of_block = std::vector{16, 32, 64, 128}[random() % 4];
    std::vector<i64> lengths(1 + random() % 20);
    for (i64& length : lengths) {
      const i64 most = std::vector<i64>{0, 2, 128, 5000}[random() % 4];
      length = random() % 4 == 0 ? rows_of_block * std::uniform_int_distribution<i64>(0, 3)(random)
                                 : std::uniform_int_distribution<i64>(0, most)(random);
    }
    SCOPED_TRACE(testing::Message() << testing::PrintToString(lengths) << " in blocks of " << rows_of_block);
    ASSERT_NO_FATAL_FAILURE(expect_blocks(lengths, rows_of_block));
  }
  expect_blocks({2147482000, 0, 600}, 128);
  expect_blocks(std::vector<i64>(100001, 21474), 128);
}

}  // namespace
}  // namespace narrows
