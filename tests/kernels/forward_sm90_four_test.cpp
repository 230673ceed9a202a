// The whole forward kernel of family sm90 on the host: four warpgroups, which leave out up to three blocks of a tile.
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
#define forward_sm90 forward_sm90_four
#define memory memory_four

namespace four_of_sm90 {
#include "shared/forward_sm90_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::bf16, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 64, kValueDim = 96, kBlockQueries = 256, kBlockKeys = 48, kWarps = 16,
                               kThreads = 640, kWarpgroups = 4, kStages = 4, kQueryStages = 2, kFactSlots = 4,
                               kTilesBeforeWait = -1, kCopyBytes = 16, kBringRegisters = 40, kComputeRegisters = 232,
                               kSharedBytes = 232448;
[[maybe_unused]] constexpr bool kLimitsKeys = true, kQueriesInRegisters = false, kOwnOutputTile = true,
                                kNatural = false, kSoftcap = false, kAlibi = false, kBias = false, kMask = false,
                                kDropout = false, kTakesTurns = false, kCached = false, kGathers = false;
}  // namespace narrows

#include "tests/kernels/forward_sm90_text.inl.hpp"

namespace narrows {

#include "tests/kernels/forward_sm90.inl.hpp"

TEST(KernelForwardSm90, four_warpgroups_leave_out_blocks) {
  for (const bool varlen : {false, true}) {
    SCOPED_TRACE(varlen);
    expect_whole_call(varlen, make_mask(-1, -1, true, 0), 2, true);
    expect_whole_call(varlen, make_mask(37, 11, false, 0), 1, false);
    expect_whole_call(varlen, make_mask(-1, 20, varlen, 60), 2, varlen);
  }
}

}  // namespace narrows
}  // namespace four_of_sm90
