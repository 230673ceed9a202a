// The whole backward kernel of family sm90 on the host: masks, in turns, two widths.
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <utility>

#include "tests/kernels/device/device.hpp"

#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of what varlen calls alone share; there are none here
#endif
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads, blocks)
#define __align__(bytes) __attribute__((aligned(bytes)))
#undef __shared__
#define __shared__
// Their names have no namespace, and every such test has a kernel of its own.
#define backward_sm90 backward_sm90_masks
#define memory memory_backward_masks

namespace masks_of_backward_sm90 {
#include "shared/backward_sm90_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::bf16, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 128, kValueDim = 64, kBlockQueries = 64, kBlockKeys = 128, kWarps = 8,
                               kThreads = 512, kColumnWarps = 1, kCluster = 1, kStages = 2, kPace = 80, kTurnRows = 128,
                               kCopyBytes = 16, kSumRegisters = 64, kTurnRegisters = 32, kKeyRegisters = 216,
                               kSharedBytes = 232448;
[[maybe_unused]] constexpr bool kLimitsKeys = true, kNatural = false, kSoftcap = false, kAlibi = false, kBias = false,
                                kMask = false, kDropout = false, kVectorSums = true, kDeterministic = true,
                                kTakesTurns = true;
}  // namespace narrows

#include "tests/kernels/backward_sm90_products.inl.hpp"

namespace narrows {

#include "tests/kernels/backward_sm90.inl.hpp"

TEST(KernelBackwardSm90, rows_that_see_every_key) { expect_backward({140, 70}, {150, 37}, {}); }
TEST(KernelBackwardSm90, causal_with_more_keys) { expect_backward({133, 60}, {201, 190}, {kUnlimited, 0, 0}); }
TEST(KernelBackwardSm90, causal_with_rows_that_see_none) { expect_backward({203, 150}, {131, 20}, {kUnlimited, 0, 0}); }
TEST(KernelBackwardSm90, causal_from_the_top_left_with_keys_that_no_row_sees) { expect_turns_of_seen_keys_alone(); }
TEST(KernelBackwardSm90, window) { expect_backward({190, 129}, {190, 133}, {40, 3, 0}); }

TEST(KernelBackwardSm90, weights_keep_their_remainders) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> exponent(-30.f, 0.f);
  for (int n = 0; n < 100'000; ++n) {
    Scores s{};
    for (float& x : s[0][0]) x = std::exp2(exponent(random));
    Remainders rest{};
    keep_remainders(rest, s);
    for (int i = 0; i < 4; ++i) {
      const u32 pair = pack(s[0][0][i & ~1], s[0][0][i | 1]);
      const bool tie = (as_bits(s[0][0][i]) & 0xffffu) == 0x8000u;
      ASSERT_NEAR(weight_of(pair, rest[0], i), s[0][0][i], s[0][0][i] * (tie ? 0x1p-7f : 0x1p-15f)) << s[0][0][i];
    }
  }
  Scores zero{};
  Remainders rest{};
  keep_remainders(rest, zero);
  ASSERT_LT(weight_of(pack(0.f, 0.f), rest[0], 1), 0x1p-126f) << "the products flush it to 0";
}

TEST(KernelBackwardSm90, places_of_facts) {
  std::vector<bool> taken(kBlockQueries);
  for (i32 row = 0; row < kBlockQueries; ++row) {
    ASSERT_FALSE(taken[static_cast<std::size_t>(fact_place(row))]) << row;
    taken[static_cast<std::size_t>(fact_place(row))] = true;
  }
}

}  // namespace narrows
}  // namespace masks_of_backward_sm90
