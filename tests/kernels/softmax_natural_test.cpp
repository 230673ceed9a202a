// The device's softmax in natural units: scores that the rules have made logits.
#include <gtest/gtest.h>

#include <random>

#include "tests/kernels/device/device.hpp"
#include "tests/shared/std_math.hpp"

namespace natural {
#include "shared/forward_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::fp32, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 32, kValueDim = 32, kBlockQueries = 32, kBlockKeys = 16, kWarps = 1,
                               kThreads = 32 * kWarps;
[[maybe_unused]] constexpr bool kNatural = true, kSoftcap = false, kAlibi = false, kBias = false, kMask = false,
                                kDropout = false;
}  // namespace narrows

#include "kernels/score_rules.cuh"
#include "kernels/softmax.cuh"

namespace narrows {
#include "tests/kernels/softmax.inl.hpp"

TEST(SoftmaxNatural, rows_equal_long_double) { expect_random_rows(natural_units<float>(), 1, 5000); }

TEST(SoftmaxNatural, neighbours_change_no_bit) { expect_alone_as_together(natural_units<float>()); }

TEST(SoftmaxNatural, nan_stays_in_its_row) { expect_nan_stays(natural_units<float>()); }

TEST(SoftmaxNatural, sinks) { expect_sinks(natural_units<float>()); }

}  // namespace narrows
}  // namespace natural
