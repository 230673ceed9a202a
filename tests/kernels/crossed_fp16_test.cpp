// Sums over the rows of tiles in fp16, run lane by lane: whole numbers, so that every sum is exact.
#include <gtest/gtest.h>

#include <random>

#include "tests/kernels/device/device.hpp"

namespace crossed_fp16 {
#include "shared/call_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::fp16;
}  // namespace narrows

#include "kernels/products.cuh"

namespace narrows {
#include "tests/kernels/crossed.inl.hpp"

struct Whole {
  std::mt19937 random{1};
  float operator()() { return static_cast<float>(std::uniform_int_distribution<int>(-9, 9)(random)); }
};

TEST(CrossedFp16, columns_by_columns) {
  Whole whole;
  const auto draw = [&] { return whole(); };
  expect_crossed<SmemTile{32, 128}, SmemTile{32, 64}, 1, 1>(draw, 0);  // 64 queries, 32 columns
  expect_crossed<SmemTile{48, 64}, SmemTile{48, 128}, 2, 1>(draw, 0);  // 32, 64: pieces of a chunk
  expect_crossed<SmemTile{32, 128}, SmemTile{32, 192}, 4, 2>(draw,
                                                             0);  // 64, 96: warps of a chunk each, and one without
  expect_crossed<SmemTile{64, 128}, SmemTile{64, 256}, 4, 2>(draw, 0);    // 64, 128
  expect_crossed<SmemTile{16, 128}, SmemTile{16, 384}, 2, 2>(draw, 0);    // 64, 192: halves of every chunk
  expect_crossed<SmemTile{32, 128}, SmemTile{32, 1152}, 12, 2>(draw, 0);  // 64, 576
}

TEST(CrossedFp16, rows_by_columns) {
  Whole whole;
  const auto draw = [&] { return whole(); };
  expect_rows<SmemTile{64, 128}, SmemTile{64, 256}, 2, 2>(draw, 0);
  expect_rows<SmemTile{32, 64}, SmemTile{32, 192}, 2, 1>(draw, 0);
  expect_rows<SmemTile{32, 128}, SmemTile{64, 384}, 2, 1>(draw, 0);
  expect_rows<SmemTile{16, 64}, SmemTile{16, 1152}, 8, 1>(draw, 0);  // of a row of scores 16 count
  expect_rows<SmemTile{32, 128}, SmemTile{48, 128}, 4, 2>(draw, 0);
}

TEST(CrossedFp16, parts_share_the_columns) {
  expect_parts_of_every_width<16>();
  expect_parts_of_every_width<128>();
}

}  // namespace narrows
}  // namespace crossed_fp16
