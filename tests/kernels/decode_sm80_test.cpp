// The whole decode kernel of family sm80 on the host, and the one that appends before it, against the definition:
// pages, lengths alike and far apart, splits that the last thread block joins, and sequences that break a rule. Thread
// blocks run one after the other.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <random>
#include <utility>

#include "tests/kernels/device/device.hpp"

#define __global__
#define __grid_constant__
#define __launch_bounds__(...)

namespace decode_of_sm80 {
#include "shared/decode_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::fp32, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 32, kValueDim = 32, kBlockQueries = 8, kBlockKeys = 16, kWarps = 2,
                               kThreads = 64, kCopyBytes = 16, kBlocksOfMultiprocessor = 1;
[[maybe_unused]] constexpr bool kNatural = false, kSoftcap = false, kAlibi = false, kBias = false, kMask = false,
                                kDropout = false, kKeepsQueries = true, kTurnsQueries = false;
}  // namespace narrows

#include "tests/kernels/decode_sm80.inl.hpp"

namespace narrows {

/// In stretches, in as many pieces as the device likes or the call asks for, and in pieces of fixed size.
TEST(KernelDecodeSm80, lengths_alike_and_far_apart) {
  for (const auto& [splits, fixed] : {std::pair{0, 0}, {3, 0}, {0, 2}})
    for (const bool alike : {true, false}) {
      SCOPED_TRACE(testing::Message() << (alike ? "alike, " : "") << splits << " splits, " << fixed << " tiles");
      CachedCall call(alike ? std::vector<i32>{70, 65} : std::vector<i32>{0, 120, 17}, 3, splits ? 0 : 2, !alike);
      call.args.visibility = make_mask(-1, 0, true, 0);
      call.args.splits = splits, call.args.fixed_split = fixed;
      call.run(4);
      ASSERT_NO_FATAL_FAILURE(expect_all(call));
    }
  for (const std::vector<i32>& lengths : {std::vector<i32>{70, 65, 73}, {1, 130, 17, 40}})
    for (const i32 lines : {1, kKvHeads})
      for (const i32 blocks : {12, 13}) {
        SCOPED_TRACE(testing::Message() << lines << " lines, " << blocks << " blocks");
        CachedCall plain(lengths, 3, 2);
        plain.args.visibility = make_mask(-1, 0, true, 0);
        plain.lines = lines;
        plain.run(blocks, true);
        ASSERT_NO_FATAL_FAILURE(expect_all(plain));
      }
}

/// What a thread block has found out before it waits for the kernel ahead counts only if that one leaves it as it was: lengths that
/// other sequences swap, that grow, that were none, and a page that comes late.
TEST(KernelDecodeSm80, lengths_and_pages_that_the_kernel_ahead_writes) {
  using Lengths = std::vector<i32>;
  const Lengths alike{70, 65}, apart{0, 120}, none{-5, 1 << 30};
  for (const auto& [before, after] : {std::pair{alike, alike},
                                      {{65, 70}, alike},
                                      {{70, 1}, alike},
                                      {none, alike},
                                      {alike, apart},
                                      {apart, apart},
                                      {{120, 0}, apart},
                                      {Lengths{64}, Lengths{65}}})
    for (const i32 fresh : {0, 2}) {
      SCOPED_TRACE(testing::Message() << before[0] << " to " << after[0] << ", " << fresh << " new");
      CachedCall call(after, 3, fresh);
      call.args.visibility = make_mask(-1, 0, true, 0);
      call.lines = kKvHeads;
      const i32 page = call.table[0], other = fresh ? page + 1 : -7;
      call.run_after(12, [&, &was = before, &is = after](bool ended) {
        call.filled = ended ? is : was;
        call.table[0] = ended ? page : other;
      });
      ASSERT_NO_FATAL_FAILURE(expect_all(call));
    }
}

TEST(KernelDecodeSm80, more_sequences_than_threads) {
  std::vector<i32> lengths;
  for (i32 s = 0; s < 2 * kThreads + 9; ++s) lengths.push_back(s % 40 == 7 ? 35 : 0);
  CachedCall call(lengths, 1, 0);
  call.run(3);
  expect_all(call);
}

TEST(KernelDecodeSm80, entries_of_pages_that_no_row_sees_are_not_read) {
  CachedCall bounded({40, 60}, 2, 1);
  bounded.begins = {32, 33, 0, 0};
  bounded.ends = {41, 38, 10, 16};  // the second sequence's rows see none of pages 1 and 2
  bounded.args.key_begin = {bounded.begins.data(), 2, 1}, bounded.args.key_end = {bounded.ends.data(), 2, 1};
  for (const i32 entry : {0, 1}) bounded.table[static_cast<std::size_t>(entry)] = -1;
  for (const i32 entry : {1, 2}) bounded.table[static_cast<std::size_t>(bounded.pages + entry)] = 1 << 30;
  bounded.run(3);
  EXPECT_TRUE(bounded.appended(0) && bounded.appended(1));
  expect_all(bounded);

  CachedCall windowed({47, 60}, 1, 1);  // the first one's keys end where a tile does
  windowed.args.visibility = make_mask(3, 0, true, 0);
  windowed.table[0] = windowed.table[1] = -1;
  windowed.run(3);
  EXPECT_TRUE(windowed.appended(0));
  expect_all(windowed);
}

TEST(KernelDecodeSm80, nothing_is_appended_to_a_sequence_that_misses_a_page_and_all_its_rows_are_nan) {
  for (const bool plain : {false, true}) {
    CachedCall call({16, 12}, 24, 24);  // three tiles of packed rows for each kv head
    call.args.visibility = make_mask(plain ? -1 : 3, 0, true, 0);
    for (Array* array : {&call.k, &call.v})
      std::replace_if(
          array->x.begin(), array->x.end(), [](float x) { return std::isnan(x); }, 7.f);  // left by others
    // With a window the first rows see page 0 and the last ones do not; without, the last ones alone see page 2.
    call.table[static_cast<std::size_t>(call.pages + (plain ? 2 : 0))] = -1;
    call.run(4, plain);
    call.expect_status({19, 1, -1, call.args.pages - 1});
    EXPECT_FALSE(call.appended(1));
    call.expect_nan(1);
    EXPECT_TRUE(call.appended(0));
    call.expect_right(0);
  }
}

TEST(KernelDecodeSm80, bounds_that_break_a_rule_append_nothing) {
  CachedCall call({20, 30, 10}, 2, 1, true);
  call.starts[2] = 1;  // less than the bound before
  call.run(3);
  call.expect_status({2, 1, 1, 2});
  for (i32 s = 0; s < 3; ++s) {
    EXPECT_FALSE(call.appended(s));
    call.starts = {0, 2, 4, 6};
    call.expect_nan(s);
  }
}

TEST(KernelDecodeSm80, rows_of_no_sequence_are_zero) {
  CachedCall call({}, 0, 0, true);
  call.run(2);
  EXPECT_EQ(call.status[0], 0);
  for (const float x : call.o.x) ASSERT_EQ(x, 0.f);
  for (const float x : call.lse.x) ASSERT_EQ(x, -std::numeric_limits<float>::infinity());

  call.starts[0] = 3;
  call.run(2);
  call.expect_status({1, 0, 3, 0});
  for (const float x : call.o.x) ASSERT_TRUE(std::isnan(x));
}

/// Of 4 queries the first 3 precede every key, or are not used: they share their packed rows with one that sees a NaN.
TEST(KernelDecodeSm80, rows_without_keys_are_zero_beside_values_that_are_nan) {
  const i32 used = 1;
  for (const bool unused : {false, true})
    for (const i32 splits : {1, 2}) {
      CachedCall call({unused ? 40 : 1}, 4, 0);
      call.args.splits = splits;
      if (unused)
        call.args.seqused_q = {&used, 1};
      else
        call.args.visibility = make_mask(-1, 0, true, 0);
      for (i32 head = 0; head < kKvHeads; ++head) call.v.at(call.page_of(0, 0), 0, head, 5) = kNaN;
      call.run(2);
      for (i32 i = 0; i < 4; ++i)
        for (i32 h = 0; h < kHeads; ++h) {
          const bool sees = i == (unused ? 0 : 3);
          ASSERT_EQ(call.lse_of(0, i, h) == -std::numeric_limits<float>::infinity(), !sees);
          ASSERT_EQ(std::isnan(call.o_of(0, i, h, 5)), sees) << "row " << i;
          for (i32 x = 0; x < kValueWidth; ++x) ASSERT_TRUE(sees || call.o_of(0, i, h, x) == 0.f) << "row " << i;
        }
    }
}

}  // namespace narrows
}  // namespace decode_of_sm80
