// The same where warps share keys: two of four make scores.
#include <gtest/gtest.h>

#include <random>

#include "tests/kernels/device/device.hpp"
#include "tests/shared/std_math.hpp"

namespace backward_fused_shared {
#include "shared/backward_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::fp16, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 64, kValueDim = 64, kBlockQueries = 32, kBlockKeys = 32, kWarps = 4,
                               kColumnWarps = 4, kThreads = 32 * kWarps;
[[maybe_unused]] constexpr bool kNatural = false, kSoftcap = false, kAlibi = false, kBias = false, kVectorSums = false;
}  // namespace narrows

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"  // sizes of 64 bits, which the device has none of
#include "kernels/backward_scores.cuh"
#pragma GCC diagnostic pop

namespace narrows {
#include "tests/kernels/backward_scores.inl.hpp"
#include "tests/kernels/backward_scores_weights.inl.hpp"

TEST(BackwardScoresFusedShared, cover_the_tile_once) { expect_scores_cover_the_tile(); }

TEST(BackwardScoresFusedShared, sums_of_dq_have_places_of_their_own) { expect_sums_have_places(); }

TEST(BackwardScoresFusedShared, unseen_keys_are_hidden) { expect_unseen_are_hidden(); }

TEST(BackwardScoresFusedShared, masked_keys_are_hidden) { expect_masked_are_hidden(); }

TEST(BackwardScoresFusedShared, weights_are_probabilities) { expect_weights(); }

TEST(BackwardScoresFusedShared, far_rows_are_brought_near) { expect_far_rows(); }

TEST(BackwardScoresFusedShared, gradients_of_probabilities) { expect_gradient_of_probabilities(); }

TEST(BackwardScoresFusedShared, slopes) { expect_slopes(); }

TEST(BackwardScoresFusedShared, stored_where_products_read) { expect_stored_scores(); }

TEST(BackwardScoresFusedShared, dropped_as_philox_says) { expect_dropout(); }

}  // namespace narrows
}  // namespace backward_fused_shared
