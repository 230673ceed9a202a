// A warp's matrix products in fp32 by three of tf32, run lane by lane.
#include <gtest/gtest.h>

#include <random>

#include "tests/kernels/device/device.hpp"

namespace fp32 {
#include "shared/forward_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 32, kValueDim = 64, kBlockQueries = 32, kBlockKeys = 16, kWarps = 2;
}  // namespace narrows

#include "kernels/forward_tiles.cuh"

namespace narrows {
#include "tests/kernels/products.inl.hpp"

TEST(ProductsFp32, every_accumulator_is_its_row_and_column) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> number(-9, 9);
  expect_products([&] { return static_cast<float>(number(random)); }, 0);
}

// Of each product at most the two lows' product is left out, 2^-22 of it; sums of fp32 round besides.
TEST(ProductsFp32, all_digits_count) {
  std::mt19937 random(2);
  std::normal_distribution<float> number;
  expect_products([&] { return number(random); }, 0x1p-21);
}

TEST(ProductsFp32, halves_hold_the_number) {
  std::mt19937 random(3);
  std::normal_distribution<float> number(0, 1e3f);
  for (int repeat = 0; repeat < 100000; ++repeat) {
    const float x = number(random);
    const Halves<1> halves({as_bits(x)});
    const float high = as_float(halves.high[0]), low = as_float(halves.low[0]);
    ASSERT_EQ(halves.high[0] & 0x1fffu, 0u) << "the tensor core reads the rest as 0";
    ASSERT_EQ(high + low, x);
    ASSERT_LE(std::abs(low), std::abs(x) * 0x1p-11f);
  }
  EXPECT_TRUE(std::isnan(as_float(Halves<1>({0x7fffffffu}).low[0]) + as_float(Halves<1>({0x7fffffffu}).high[0])));
}

}  // namespace narrows
}  // namespace fp32
