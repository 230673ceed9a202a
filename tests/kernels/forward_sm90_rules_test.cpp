// The whole forward kernel of family sm90 on the host: softcap, ALiBi and sinks, O through the tile of Q.
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
#define forward_sm90 forward_sm90_rules
#define memory memory_rules

namespace rules_of_sm90 {
#include "shared/forward_sm90_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::fp16, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 96, kValueDim = 64, kBlockQueries = 128, kBlockKeys = 80, kWarps = 8,
                               kThreads = 384, kWarpgroups = 2, kStages = 3, kQueryStages = 1, kFactSlots = 2,
                               kTilesBeforeWait = -1, kCopyBytes = 16, kBringRegisters = 40, kComputeRegisters = 232,
                               kSharedBytes = 232448;
[[maybe_unused]] constexpr bool kLimitsKeys = true, kQueriesInRegisters = false, kOwnOutputTile = false,
                                kNatural = true, kSoftcap = true, kAlibi = true, kBias = false, kMask = false,
                                kDropout = false, kTakesTurns = true, kCached = false, kGathers = false;
}  // namespace narrows

#include "tests/kernels/forward_sm90_text.inl.hpp"

namespace narrows {

#include "tests/kernels/forward_sm90.inl.hpp"

TEST(KernelForwardSm90, score_rules_and_sinks) {
  for (const bool varlen : {false, true}) {
    SCOPED_TRACE(varlen);
    expect_whole_call(varlen, make_mask(60, -1, true, 0), 2, varlen);
  }
}

}  // namespace narrows
}  // namespace rules_of_sm90
