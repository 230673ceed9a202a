// The same where two warps share keys.
#include <gtest/gtest.h>

#include <random>

#include "tests/kernels/device/device.hpp"
#include "tests/shared/std_math.hpp"

namespace backward_natural_shared {
#include "shared/backward_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::bf16, kBiasElement = Element::bf16;
[[maybe_unused]] constexpr int kHeadDim = 64, kValueDim = 32, kBlockQueries = 64, kBlockKeys = 64, kWarps = 4,
                               kColumnWarps = 2, kThreads = 32 * kWarps;
[[maybe_unused]] constexpr bool kNatural = true, kSoftcap = true, kAlibi = true, kBias = true, kVectorSums = true;
}  // namespace narrows

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"  // sizes of 64 bits, which the device has none of
#include "kernels/backward_scores.cuh"
#pragma GCC diagnostic pop

namespace narrows {
#include "tests/kernels/backward_scores.inl.hpp"
#include "tests/kernels/backward_scores_logits.inl.hpp"
#include "tests/kernels/backward_scores_weights.inl.hpp"

TEST(BackwardScoresNaturalShared, cover_the_tile_once) { expect_scores_cover_the_tile(); }

TEST(BackwardScoresNaturalShared, sums_of_dq_have_places_of_their_own) { expect_sums_have_places(); }

TEST(BackwardScoresNaturalShared, unseen_keys_are_hidden) { expect_unseen_are_hidden(); }

TEST(BackwardScoresNaturalShared, masked_keys_are_hidden) { expect_masked_are_hidden(); }

TEST(BackwardScoresNaturalShared, weights_are_probabilities) { expect_weights(); }

TEST(BackwardScoresNaturalShared, logits_by_every_rule) { expect_logits(); }

TEST(BackwardScoresNaturalShared, gradients_of_probabilities) { expect_gradient_of_probabilities(); }

TEST(BackwardScoresNaturalShared, slopes) { expect_slopes(); }

TEST(BackwardScoresNaturalShared, stored_where_products_read) { expect_stored_scores(); }

TEST(BackwardScoresNaturalShared, dropped_as_philox_says) { expect_dropout(); }

}  // namespace narrows
}  // namespace backward_natural_shared
