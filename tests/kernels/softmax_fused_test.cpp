// The device's softmax in fused units: scores that the exponent scales.
#include <gtest/gtest.h>

#include <random>

#include "tests/kernels/device/device.hpp"
#include "tests/shared/std_math.hpp"

namespace fused {
#include "shared/forward_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::fp32, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 32, kValueDim = 32, kBlockQueries = 32, kBlockKeys = 16, kWarps = 1,
                               kThreads = 32 * kWarps;
[[maybe_unused]] constexpr bool kNatural = false, kSoftcap = false, kAlibi = false, kBias = false, kMask = false,
                                kDropout = false;
}  // namespace narrows

#include "kernels/score_rules.cuh"
#include "kernels/softmax.cuh"

namespace narrows {
#include "tests/kernels/softmax.inl.hpp"

TEST(SoftmaxFused, rows_equal_long_double) {
  unsigned seed = 0;
  for (const double scale : {1., 0.125, 0.7, -0.5, 0., 1e-3})
    ASSERT_NO_FATAL_FAILURE(expect_random_rows(fused_units<float>(scale), ++seed, 2500)) << scale;
}

TEST(SoftmaxFused, neighbours_change_no_bit) { expect_alone_as_together(fused_units<float>(0.7)); }

TEST(SoftmaxFused, nan_stays_in_its_row) { expect_nan_stays(fused_units<float>(0.7)); }

TEST(SoftmaxFused, sinks) { expect_sinks(fused_units<float>(0.7)); }

}  // namespace narrows
}  // namespace fused
