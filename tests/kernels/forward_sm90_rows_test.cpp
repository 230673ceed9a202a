// The whole forward kernel of family sm90 on the host: rows gathered from pages of any size, with score rules and sinks.
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
#define forward_sm90 forward_sm90_rows
#define memory memory_rows

namespace rows_of_sm90 {
#include "shared/cached_forward_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::fp16, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 96, kValueDim = 64, kBlockQueries = 128, kBlockKeys = 80, kWarps = 8,
                               kThreads = 384, kWarpgroups = 2, kStages = 2, kQueryStages = 1, kFactSlots = 2,
                               kTilesBeforeWait = 2, kCopyBytes = 16, kBringRegisters = 40, kComputeRegisters = 232,
                               kSharedBytes = 232448;
[[maybe_unused]] constexpr bool kLimitsKeys = true, kQueriesInRegisters = false, kOwnOutputTile = false,
                                kNatural = true, kSoftcap = true, kAlibi = true, kBias = false, kMask = false,
                                kDropout = false, kTakesTurns = false, kCached = true, kGathers = true;
}  // namespace narrows

#include "tests/kernels/forward_sm90_text.inl.hpp"

namespace narrows {

#include "tests/kernels/forward_sm90.inl.hpp"

#include "tests/kernels/forward_sm90_cached.inl.hpp"

TEST(KernelForwardSm90, keys_gathered_from_pages_of_any_size) {
  for (const CacheShape& shape : {CacheShape{1, true, false}, CacheShape{7, false, true}, CacheShape{64, true, true},
                                  CacheShape{100, false, false}})
    expect_cached_call(shape.page % 2 == 0, shape, make_mask(-1, -1, true, 0));
  expect_cached_call(false, {256, true, false}, make_mask(37, 11, false, 0), 1);
  expect_cached_call(true, {16, true, true}, make_mask(-1, 20, true, 60));
}

TEST(KernelForwardSm90, an_entry_that_is_no_page_of_one_key) {
  CachedCall call(false, cached_lengths(false), {1, true, false});
  call.args.visibility = make_mask(-1, -1, true, 0);
  call.table[static_cast<std::size_t>(call.pages_of_row + call.leftpad[1] + 60)] = 5000;
  expect_refused(call, {static_cast<i32>(StatusCode::block_table), 1, 5000, call.key_rows - 1});
}

TEST(KernelForwardSm90, a_row_that_is_none_of_gathered_pages) { expect_no_row({16, true, true}); }

}  // namespace narrows
}  // namespace rows_of_sm90
