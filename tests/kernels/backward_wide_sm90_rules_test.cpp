// The backward kernel of wide heads of family sm90 on the host: all score rules, chunks, fp16, the narrower width.
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
#define __cluster_dims__(x, y, z)
#define __launch_bounds__(threads, blocks)
// Its name has no namespace, and every such test has a kernel of its own.
#define backward_wide_sm90 backward_wide_sm90_rules

namespace rules_of_backward_wide_sm90 {
#include "shared/backward_sm90_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::fp16, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 192, kValueDim = 128, kBlockQueries = 64, kBlockKeys = 128, kWarps = 8,
                               kThreads = 512, kColumnWarps = 1, kCluster = 2, kStages = 2, kOutputStages = 2,
                               kPace = 80, kTurnRows = 128, kCopyBytes = 16, kSumRegisters = 64, kKeyRegisters = 160,
                               kSharedBytes = 232448;
[[maybe_unused]] constexpr bool kLimitsKeys = true, kNatural = true, kSoftcap = true, kAlibi = true, kBias = false,
                                kMask = false, kDropout = false, kVectorSums = true, kDeterministic = false;
}  // namespace narrows

#include "tests/kernels/backward_wide_sm90_products.inl.hpp"

namespace narrows {

#include "tests/kernels/backward_sm90.inl.hpp"

TEST(KernelBackwardWideSm90, chunks_with_rules) { expect_backward({70, 40}, {133, 74}, {kUnlimited, kUnlimited, 70}); }
TEST(KernelBackwardWideSm90, causal_with_rules) { expect_backward({70, 30}, {90, 40}, {kUnlimited, 0, 0}); }

}  // namespace narrows
}  // namespace rules_of_backward_wide_sm90
