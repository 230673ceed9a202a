// The backward kernel of wide heads of family sm90 on the host: every row sees every key, in any order, many steps.
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
#define backward_wide_sm90 backward_wide_sm90_whole

namespace whole_of_backward_wide_sm90 {
#include "shared/backward_sm90_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::bf16, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 256, kValueDim = 256, kBlockQueries = 64, kBlockKeys = 128, kWarps = 8,
                               kThreads = 512, kColumnWarps = 1, kCluster = 2, kStages = 2, kOutputStages = 1,
                               kPace = 80, kTurnRows = 128, kCopyBytes = 16, kSumRegisters = 64, kKeyRegisters = 160,
                               kSharedBytes = 232448;
[[maybe_unused]] constexpr bool kLimitsKeys = false, kNatural = false, kSoftcap = false, kAlibi = false, kBias = false,
                                kMask = false, kDropout = false, kVectorSums = true, kDeterministic = false;
}  // namespace narrows

#include "tests/kernels/backward_wide_sm90_products.inl.hpp"

namespace narrows {

#include "tests/kernels/backward_sm90.inl.hpp"

TEST(KernelBackwardWideSm90, rows_that_see_every_key_in_any_order) { expect_backward({140, 70}, {130, 37}, {}); }

}  // namespace narrows
}  // namespace whole_of_backward_wide_sm90
