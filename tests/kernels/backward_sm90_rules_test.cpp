// The whole backward kernel of family sm90 on the host: all score rules, chunks, fp16.
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
#define backward_sm90 backward_sm90_rules
#define memory memory_backward_rules

namespace rules_of_backward_sm90 {
#include "shared/backward_sm90_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::fp16, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 64, kValueDim = 128, kBlockQueries = 64, kBlockKeys = 128, kWarps = 8,
                               kThreads = 384, kColumnWarps = 1, kCluster = 1, kStages = 2, kPace = 80, kTurnRows = 128,
                               kCopyBytes = 16, kSumRegisters = 64, kTurnRegisters = 32, kKeyRegisters = 216,
                               kSharedBytes = 232448;
[[maybe_unused]] constexpr bool kLimitsKeys = true, kNatural = true, kSoftcap = true, kAlibi = true, kBias = false,
                                kMask = false, kDropout = false, kVectorSums = true, kDeterministic = false,
                                kTakesTurns = true;
}  // namespace narrows

#include "tests/kernels/backward_sm90_products.inl.hpp"

namespace narrows {

#include "tests/kernels/backward_sm90.inl.hpp"

TEST(KernelBackwardSm90, chunks_with_rules) { expect_backward({190, 129}, {190, 133}, {kUnlimited, kUnlimited, 70}); }
TEST(KernelBackwardSm90, causal_with_rules) { expect_backward({133, 60}, {201, 190}, {kUnlimited, 0, 0}); }

TEST(KernelBackwardSm90, fp16_weights_keep_their_remainders) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> exponent(-45.f, 0.f);
  for (int n = 0; n < 100'000; ++n) {
    Scores s{};
    for (float& x : s[0][0]) x = std::exp2(exponent(random)) * kWeightUnit;
    Remainders rest{};
    keep_remainders(rest, s);
    for (int i = 0; i < 4; ++i) {
      const float x = s[0][0][i], found = weight_of(pack(s[0][0][i & ~1], s[0][0][i | 1]), rest[0], i);
      // Below 2^-14 fp16 has fewer digits, and below 2^-25 none.
      ASSERT_NEAR(
          found, x,
          std::max(x * ((as_bits(x) & 0x1fffu) == 0x1000u ? 0x1p-10f : 0x1p-18f), x < 0x1p-14f ? 0x1p-24f : 0.f));
      ASSERT_GE(found, 0.f);
    }
  }
  Scores nan{};
  nan[0][0][1] = std::numeric_limits<float>::quiet_NaN();
  Remainders rest{};
  keep_remainders(rest, nan);
  const u32 pair = pack(nan[0][0][0], nan[0][0][1]);
  ASSERT_TRUE(std::isnan(weight_of(pair, rest[0], 1)));
  ASSERT_LT(weight_of(pair, rest[0], 0), 0x1p-126f) << "the products flush it to 0";
}

}  // namespace narrows
}  // namespace rules_of_backward_sm90
