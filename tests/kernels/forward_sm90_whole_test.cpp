// The whole forward kernel of family sm90 on the host: every row sees every key.
#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <random>
#include <utility>

#include "tests/kernels/device/device.hpp"

#define __global__
#define __grid_constant__
#define __launch_bounds__(threads, blocks)
#define __align__(bytes) __attribute__((aligned(bytes)))
#undef __shared__
#define __shared__
// Their names have no namespace, and every such test has a kernel of its own.
#define forward_sm90 forward_sm90_whole
#define memory memory_whole

namespace whole_of_sm90 {
#include "shared/forward_sm90_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::bf16, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 64, kValueDim = 64, kBlockQueries = 128, kBlockKeys = 64, kWarps = 8,
                               kThreads = 384, kWarpgroups = 2, kStages = 2, kQueryStages = 2, kFactSlots = 2,
                               kTilesBeforeWait = -1, kCopyBytes = 16, kBringRegisters = 40, kComputeRegisters = 232,
                               kSharedBytes = 232448;
[[maybe_unused]] constexpr bool kLimitsKeys = false, kQueriesInRegisters = false, kOwnOutputTile = true,
                                kNatural = false, kSoftcap = false, kAlibi = false, kBias = false, kMask = false,
                                kDropout = false, kTakesTurns = false, kCached = false, kGathers = false;
}  // namespace narrows

#include "tests/kernels/forward_sm90_text.inl.hpp"

namespace narrows {

#include "tests/kernels/forward_sm90.inl.hpp"

TEST(KernelForwardSm90, rows_that_see_every_key) {
  for (const bool varlen : {false, true}) {
    SCOPED_TRACE(varlen);
    expect_whole_call(varlen, {}, 3, varlen);
  }
}

TEST(KernelForwardSm90, lengths_that_break_a_rule) {
  expect_breach(&WholeCall::used_keys, 1, 15, 1, {8, 1, 15, 14});
  expect_breach(&WholeCall::used_queries, 1, -1, 1, {7, 1, -1, 40});
  expect_breach(&WholeCall::query_starts, 2, 10, 1, {2, 1, 10, 20});
  expect_breach(&WholeCall::key_starts, 3, 1 << 20, 2, {6, 2, 1 << 20, 175});
}

}  // namespace narrows
}  // namespace whole_of_sm90
