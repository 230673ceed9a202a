// Sums over the rows of tiles in fp32 by three of tf32, run lane by lane.
#include <gtest/gtest.h>

#include <random>

#include "tests/kernels/device/device.hpp"

namespace crossed_fp32 {
#include "shared/call_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::fp32;
}  // namespace narrows

#include "kernels/products.cuh"

namespace narrows {
#include "tests/kernels/crossed.inl.hpp"

template <class Draw> void expect_all(const Draw& draw, double tolerance) {
  expect_crossed<SmemTile{32, 128}, SmemTile{32, 128}, 4, 1>(draw, tolerance);  // 32 queries and columns
  expect_crossed<SmemTile{16, 128}, SmemTile{16, 384}, 2, 1>(draw, tolerance);  // 96 columns: halves of every chunk
  expect_crossed<SmemTile{16, 128}, SmemTile{16, 256}, 8, 1>(draw, tolerance);
  // Rows of scores of 64 bytes: two of the four that are read at once lie in the same banks.
  expect_crossed<SmemTile{32, 64}, SmemTile{32, 768}, 4, 1>(draw, tolerance, 2);
  expect_rows<SmemTile{64, 128}, SmemTile{32, 512}, 4, 2>(draw, tolerance);
  expect_rows<SmemTile{32, 128}, SmemTile{32, 384}, 2, 1>(draw, tolerance);
  expect_rows<SmemTile{16, 64}, SmemTile{16, 2304}, 8, 1>(draw, tolerance);
}

TEST(CrossedFp32, every_sum_is_its_row_and_column) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> number(-9, 9);
  expect_all([&] { return static_cast<float>(number(random)); }, 0);
}

// Of each product at most the two lows' product is left out, 2^-22 of it; sums of fp32 round besides.
TEST(CrossedFp32, all_digits_count) {
  std::mt19937 random(2);
  std::normal_distribution<float> number;
  expect_all([&] { return number(random); }, 0x1p-20);
}

TEST(CrossedFp32, parts_share_the_columns) {
  expect_parts_of_every_width<16>();
  expect_parts_of_every_width<64>();
}

}  // namespace narrows
}  // namespace crossed_fp32
