// The whole forward kernel of family sm90 on the host: keys in a cache or in pages of which every row sees every one.
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
#define forward_sm90 forward_sm90_pages
#define memory memory_pages

namespace pages_of_sm90 {
#include "shared/cached_forward_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::bf16, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 64, kValueDim = 64, kBlockQueries = 128, kBlockKeys = 64, kWarps = 8,
                               kThreads = 384, kWarpgroups = 2, kStages = 2, kQueryStages = 2, kFactSlots = 2,
                               kTilesBeforeWait = -1, kCopyBytes = 16, kBringRegisters = 40, kComputeRegisters = 232,
                               kSharedBytes = 232448;
[[maybe_unused]] constexpr bool kLimitsKeys = false, kQueriesInRegisters = false, kOwnOutputTile = true,
                                kNatural = false, kSoftcap = false, kAlibi = false, kBias = false, kMask = false,
                                kDropout = false, kTakesTurns = true, kCached = true, kGathers = false;
}  // namespace narrows

#include "tests/kernels/forward_sm90_text.inl.hpp"

namespace narrows {

#include "tests/kernels/forward_sm90.inl.hpp"

#include "tests/kernels/forward_sm90_cached.inl.hpp"

TEST(KernelForwardSm90, every_key_of_a_cache_or_of_pages) {
  expect_cached_call(false, {16, false, false}, {}, 3);
  expect_cached_call(true, {64, false, true}, {});
  expect_cached_call(true, {0, true, true}, {});
}

TEST(KernelForwardSm90, a_row_that_is_none_of_pages_of_which_every_key_is_seen) { expect_no_row({16, false, true}); }

}  // namespace narrows
}  // namespace pages_of_sm90
