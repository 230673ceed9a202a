// The whole backward kernel of family sm90 on the host: every row sees every key, in any order.
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
#define backward_sm90 backward_sm90_whole
#define memory memory_backward_whole

namespace whole_of_backward_sm90 {
#include "shared/backward_sm90_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::bf16, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 64, kValueDim = 64, kBlockQueries = 128, kBlockKeys = 128, kWarps = 8,
                               kThreads = 384, kColumnWarps = 1, kCluster = 1, kStages = 3, kPace = 80, kTurnRows = 128,
                               kCopyBytes = 16, kSumRegisters = 64, kTurnRegisters = 32, kKeyRegisters = 216,
                               kSharedBytes = 232448;
[[maybe_unused]] constexpr bool kLimitsKeys = false, kNatural = false, kSoftcap = false, kAlibi = false, kBias = false,
                                kMask = false, kDropout = false, kVectorSums = true, kDeterministic = false,
                                kTakesTurns = false;
}  // namespace narrows

#include "tests/kernels/backward_sm90_products.inl.hpp"

namespace narrows {

#include "tests/kernels/backward_sm90.inl.hpp"

TEST(KernelBackwardSm90, rows_that_see_every_key_in_any_order) { expect_backward({290, 70}, {150, 37}, {}); }

}  // namespace narrows
}  // namespace whole_of_backward_sm90
