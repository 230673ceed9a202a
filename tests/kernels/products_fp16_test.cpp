// A warp's matrix products in fp16, run lane by lane: whole numbers, so that every sum is exact.
#include <gtest/gtest.h>

#include <random>

#include "tests/kernels/device/device.hpp"

namespace fp16 {
#include "shared/forward_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::fp16;
[[maybe_unused]] constexpr int kHeadDim = 96, kValueDim = 32, kBlockQueries = 32, kBlockKeys = 32, kWarps = 2;
}  // namespace narrows

#include "kernels/forward_tiles.cuh"

namespace narrows {
#include "tests/kernels/products.inl.hpp"

TEST(ProductsFp16, every_accumulator_is_its_row_and_column) {
  std::mt19937 random(1);
  std::uniform_int_distribution<int> number(-9, 9);
  expect_products([&] { return static_cast<float>(number(random)); }, 0);
}

}  // namespace narrows
}  // namespace fp16
