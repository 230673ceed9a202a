// Tiles in shared memory: each unit has a place of its own, and what is read at once lies in different banks.
#include "kernels/smem_tile.cuh"

#include <gtest/gtest.h>

#include <array>
#include <set>

namespace narrows {
namespace {

constexpr int kBanks = 32, kBankBytes = 4;
constexpr std::array kTileRows{16, 32, 64, 128};
constexpr std::array kRowBytes{64, 128, 192, 256, 384, 512, 768, 1024};

template <class Check> void for_each_tile(const Check& check) {
  for (const int rows : kTileRows)
    for (const int row_bytes : kRowBytes) {
      SCOPED_TRACE(testing::Message() << rows << " rows of " << row_bytes << " bytes");
      const SmemTile tile{rows, row_bytes};
      check(tile, row_bytes / kUnitBytes);
    }
}

/// Banks of 16 bytes, as bits.
u32 banks_of(u32 offset) { return 0xfu << offset / kBankBytes % kBanks; }

TEST(SmemTile, units_fill_the_tile) {
  for_each_tile([](const SmemTile& tile, int units) {
    std::set<u32> offsets;
    for (int row = 0; row < tile.rows; ++row)
      for (int unit = 0; unit < units; ++unit) {
        const u32 offset = tile.offset(row, unit);
        ASSERT_EQ(offset % kUnitBytes, 0u);
        ASSERT_LT(offset, static_cast<u32>(tile.bytes()));
        ASSERT_TRUE(offsets.insert(offset).second) << row << " " << unit;
      }
  });
}

TEST(SmemTile, eight_rows_of_a_unit_meet_every_bank_once) {
  for_each_tile([](const SmemTile& tile, int units) {
    for (int first = 0; first < tile.rows; first += 8)
      for (int unit = 0; unit < units; ++unit) {
        u32 banks = 0;
        for (int row = first; row < first + 8; ++row) banks |= banks_of(tile.offset(row, unit));
        ASSERT_EQ(banks, ~0u) << first << " " << unit;
      }
  });
}

TEST(SmemTile, the_units_of_a_chunk_meet_no_bank_twice) {
  for_each_tile([](const SmemTile& tile, int units) {
    for (int row = 0; row < tile.rows; ++row)
      for (int first = 0; first < units; first += tile.chunk_units()) {
        u32 banks = 0;
        for (int unit = first; unit < first + tile.chunk_units(); ++unit) {
          ASSERT_EQ(banks & banks_of(tile.offset(row, unit)), 0u);
          banks |= banks_of(tile.offset(row, unit));
        }
      }
  });
}

/// From any row and the units [0, first_units), steps of so many units and of 8 rows lead where the tile says.
template <SmemTile tile> void expect_addresses(int first_units) {
  constexpr u32 kStart = 4096;
  for (int row = 0; row < tile.rows; ++row)
    for (int first = 0; first < first_units; ++first) {
      const UnitAddress<tile> address(kStart, row, first);
      for (int unit = 0; first + unit < tile.row_bytes / kUnitBytes; unit += first_units)
        for (int below = 0; row + below < tile.rows; below += 8)
          ASSERT_EQ(address.at(unit, below), kStart + tile.offset(row + below, first + unit))
              << row << "+" << below << ", " << first << "+" << unit;
    }
}

template <int rows> void expect_addresses_of_rows() {
  // Matrix loads begin in unit 0 or 1, copies in any of a chunk.
  for (const int first_units : {1, 2, 4}) {
    expect_addresses<SmemTile{rows, 64}>(first_units);
    expect_addresses<SmemTile{rows, 192}>(first_units);
    expect_addresses<SmemTile{rows, 128}>(first_units);
    expect_addresses<SmemTile{rows, 512}>(first_units);
  }
  expect_addresses<SmemTile{rows, 128}>(8);
  expect_addresses<SmemTile{rows, 256}>(8);
  expect_addresses<SmemTile{rows, 384}>(8);
  expect_addresses<SmemTile{rows, 768}>(8);
  expect_addresses<SmemTile{rows, 1024}>(8);
}

TEST(SmemTile, addresses_go_on_by_exclusive_or) {
  expect_addresses_of_rows<16>();
  expect_addresses_of_rows<32>();
  expect_addresses_of_rows<64>();
  expect_addresses_of_rows<128>();
}

}  // namespace
}  // namespace narrows
