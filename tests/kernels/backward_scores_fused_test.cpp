// The backward pass's scores in fused units, of warps that have keys of their own.
#include <gtest/gtest.h>

#include <random>

#include "tests/kernels/device/device.hpp"
#include "tests/shared/std_math.hpp"

namespace backward_fused {
#include "shared/backward_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::bf16, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 64, kValueDim = 32, kBlockQueries = 32, kBlockKeys = 128, kWarps = 4,
                               kColumnWarps = 1, kThreads = 32 * kWarps;
[[maybe_unused]] constexpr bool kNatural = false, kSoftcap = false, kAlibi = false, kBias = false, kVectorSums = true;
}  // namespace narrows

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"  // sizes of 64 bits, which the device has none of
#include "kernels/backward_scores.cuh"
#pragma GCC diagnostic pop

namespace narrows {
#include "tests/kernels/backward_scores.inl.hpp"
#include "tests/kernels/backward_scores_weights.inl.hpp"

TEST(BackwardScoresFused, cover_the_tile_once) { expect_scores_cover_the_tile(); }

TEST(BackwardScoresFused, sums_of_dq_have_places_of_their_own) { expect_sums_have_places(); }

TEST(BackwardScoresFused, unseen_keys_are_hidden) { expect_unseen_are_hidden(); }

TEST(BackwardScoresFused, masked_keys_are_hidden) { expect_masked_are_hidden(); }

TEST(BackwardScoresFused, weights_are_probabilities) { expect_weights(); }

TEST(BackwardScoresFused, far_rows_are_brought_near) { expect_far_rows(); }

TEST(BackwardScoresFused, gradients_of_probabilities) { expect_gradient_of_probabilities(); }

TEST(BackwardScoresFused, slopes) { expect_slopes(); }

TEST(BackwardScoresFused, stored_where_products_read) { expect_stored_scores(); }

TEST(BackwardScoresFused, dropped_as_philox_says) { expect_dropout(); }

}  // namespace narrows
}  // namespace backward_fused
