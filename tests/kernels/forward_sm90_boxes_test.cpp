// The whole forward kernel of family sm90 on the host: keys in a cache or in pages that the copy engine brings.
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
#define forward_sm90 forward_sm90_boxes
#define memory memory_boxes

namespace boxes_of_sm90 {
#include "shared/cached_forward_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::bf16, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 64, kValueDim = 96, kBlockQueries = 128, kBlockKeys = 48, kWarps = 8,
                               kThreads = 384, kWarpgroups = 2, kStages = 2, kQueryStages = 1, kFactSlots = 3,
                               kTilesBeforeWait = -1, kCopyBytes = 16, kBringRegisters = 40, kComputeRegisters = 232,
                               kSharedBytes = 232448;
[[maybe_unused]] constexpr bool kLimitsKeys = true, kQueriesInRegisters = true, kOwnOutputTile = true, kNatural = false,
                                kSoftcap = false, kAlibi = false, kBias = false, kMask = false, kDropout = false,
                                kTakesTurns = true, kCached = true, kGathers = false;
}  // namespace narrows

#include "tests/kernels/forward_sm90_text.inl.hpp"

namespace narrows {

#include "tests/kernels/forward_sm90.inl.hpp"

#include "tests/kernels/forward_sm90_cached.inl.hpp"

TEST(KernelForwardSm90, keys_in_a_cache) {
  for (const bool varlen : {false, true}) {
    expect_cached_call(varlen, {0, varlen, true}, make_mask(-1, -1, true, 0));
    expect_cached_call(varlen, {0, !varlen, false}, make_mask(37, 11, false, 0), 1);
  }
}

TEST(KernelForwardSm90, keys_in_pages_that_hold_whole_boxes) {
  for (const i32 page : {8, 16, 48, 64, 128, 256})
    expect_cached_call(page % 3 == 1, {page, false, page == 16}, make_mask(-1, -1, true, 0));
  expect_cached_call(true, {16, false, true}, make_mask(37, 11, false, 0));
  expect_cached_call(false, {24, false, false}, make_mask(-1, 20, false, 60), 1);
}

/// The last keys have been appended by a kernel before, which refused sequence 1.
TEST(KernelForwardSm90, new_keys_are_keys_and_refused_sequences_are_nan) {
  CachedCall call(false, cached_lengths(false), {16, false, false});
  call.args.visibility = make_mask(-1, -1, true, 0);
  for (i32& slots : call.filled) slots -= 3;
  i32 refused[3] = {0, 1, 0};
  char row = 0;
  call.args.cache.k_new.data = &row;
  call.args.cache.new_rows = 3;
  call.args.cache.refused = refused;
  call.spoil_table();
  expect_refused(call, {});
}

/// Rows of every tile that reads it are NaN.
TEST(KernelForwardSm90, an_entry_that_is_no_page) {
  CachedCall call(false, cached_lengths(false), {64, false, false});
  call.args.visibility = make_mask(-1, -1, true, 0);
  const i32 pages = call.key_rows / 64;
  call.table[static_cast<std::size_t>(call.pages_of_row)] = pages;  // of the first keys of sequence 1
  expect_refused(call, {static_cast<i32>(StatusCode::block_table), 1, pages, pages - 1});
  CachedCall negative(false, cached_lengths(false), {16, false, false});
  negative.args.visibility = make_mask(-1, -1, true, 0);
  negative.table[static_cast<std::size_t>(negative.pages_of_row) + 2] = -1;
  expect_refused(negative, {static_cast<i32>(StatusCode::block_table), 1, -1, negative.key_rows / 16 - 1});
}

TEST(KernelForwardSm90, lengths_of_a_cache_that_break_a_rule) {
  const auto broken = [](const CacheShape& shape, std::vector<i32> CachedCall::*values, i32 value, StatusCode code,
                         i32 limit) {
    CachedCall call(false, cached_lengths(false), shape);
    (call.*values)[1] = value;
    expect_refused(call, {static_cast<i32>(code), 1, value, limit});
  };
  broken({}, &CachedCall::filled, 146, StatusCode::cache_seqlens, 145);
  broken({}, &CachedCall::filled, -1, StatusCode::cache_seqlens, 145);
  broken({0, true, false}, &CachedCall::leftpad, 162, StatusCode::leftpad, 161);
  broken({0, false, true}, &CachedCall::row_of, 4, StatusCode::cache_batch_idx, 3);
  broken({16, false, true}, &CachedCall::row_of, -1, StatusCode::cache_batch_idx, 3);
}

}  // namespace narrows
}  // namespace boxes_of_sm90
