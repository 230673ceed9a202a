// The backward kernel of wide heads of family sm90 on the host: masks, in turns, two widths, of which one has an odd number of
// chunks.
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
#define backward_wide_sm90 backward_wide_sm90_masks

namespace masks_of_backward_wide_sm90 {
#include "shared/backward_sm90_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::bf16, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 256, kValueDim = 192, kBlockQueries = 64, kBlockKeys = 128, kWarps = 8,
                               kThreads = 512, kColumnWarps = 1, kCluster = 2, kStages = 2, kOutputStages = 1,
                               kPace = 80, kTurnRows = 128, kCopyBytes = 16, kSumRegisters = 64, kKeyRegisters = 160,
                               kSharedBytes = 232448;
[[maybe_unused]] constexpr bool kLimitsKeys = true, kNatural = false, kSoftcap = false, kAlibi = false, kBias = false,
                                kMask = false, kDropout = false, kVectorSums = true, kDeterministic = true;
}  // namespace narrows

#include "tests/kernels/backward_wide_sm90_products.inl.hpp"

namespace narrows {

#include "tests/kernels/backward_sm90.inl.hpp"

TEST(KernelBackwardWideSm90, rows_that_see_every_key) { expect_backward({70, 40}, {140, 37}, {}); }
TEST(KernelBackwardWideSm90, causal_with_more_keys) { expect_backward({40, 30}, {201, 150}, {kUnlimited, 0, 0}); }
TEST(KernelBackwardWideSm90, causal_with_rows_that_see_none) {
  expect_backward({140, 70}, {70, 20}, {kUnlimited, 0, 0});
}
TEST(KernelBackwardWideSm90, turns_repeat_bit_by_bit) {
  BackwardCall calls[2]{{{40, 20}, {140, 37}, {kUnlimited, 0, 0}}, {{40, 20}, {140, 37}, {kUnlimited, 0, 0}}};
  for (BackwardCall& call : calls) call.run();
  EXPECT_EQ(calls[0].sums, calls[1].sums);
  EXPECT_EQ(calls[0].dk, calls[1].dk);
  EXPECT_EQ(calls[0].dv_, calls[1].dv_);
  u32 turns = 0;
  for (const u32 passed : calls[0].turns) turns += passed;
  EXPECT_EQ(turns, BackwardCall::heads * kWarps * (2 + 1)) << "blocks of keys of the first sequence and of the second";
}
TEST(KernelBackwardWideSm90, causal_from_the_top_left_with_keys_that_no_row_sees) { expect_turns_of_seen_keys_alone(); }
TEST(KernelBackwardWideSm90, window) { expect_backward({150, 70}, {150, 74}, {40, 3, 0}); }

}  // namespace narrows
}  // namespace masks_of_backward_wide_sm90
