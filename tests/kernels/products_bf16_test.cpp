// A warp's matrix products in bf16, run lane by lane: whole numbers, so that every sum is exact.
#include <gtest/gtest.h>

#include <random>

#include "tests/kernels/device/device.hpp"

namespace bf16 {
#include "shared/forward_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::bf16;
[[maybe_unused]] constexpr int kHeadDim = 64, kValueDim = 96, kBlockQueries = 64, kBlockKeys = 48, kWarps = 2;
}  // namespace narrows

#include "kernels/forward_tiles.cuh"

namespace narrows {
#include "tests/kernels/products.inl.hpp"

TEST(ProductsBf16, every_accumulator_is_its_row_and_column) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> number(-9, 9);
  expect_products([&] { return static_cast<float>(number(random)); }, 0);
}

}  // namespace narrows
}  // namespace bf16
