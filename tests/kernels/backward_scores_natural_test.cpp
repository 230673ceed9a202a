// The backward pass's scores as logits, of warps that have keys of their own.
#include <gtest/gtest.h>

#include <random>

#include "tests/kernels/device/device.hpp"
#include "tests/shared/std_math.hpp"

namespace backward_natural {
#include "shared/backward_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::fp32, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 64, kValueDim = 32, kBlockQueries = 16, kBlockKeys = 64, kWarps = 4,
                               kColumnWarps = 1, kThreads = 32 * kWarps;
[[maybe_unused]] constexpr bool kNatural = true, kSoftcap = true, kAlibi = true, kBias = true, kVectorSums = false;
}  // namespace narrows

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"  // sizes of 64 bits, which the device has none of
#include "kernels/backward_scores.cuh"
#pragma GCC diagnostic pop

namespace narrows {
#include "tests/kernels/backward_scores.inl.hpp"
#include "tests/kernels/backward_scores_logits.inl.hpp"
#include "tests/kernels/backward_scores_weights.inl.hpp"

TEST(BackwardScoresNatural, cover_the_tile_once) { expect_scores_cover_the_tile(); }

TEST(BackwardScoresNatural, sums_of_dq_have_places_of_their_own) { expect_sums_have_places(); }

TEST(BackwardScoresNatural, unseen_keys_are_hidden) { expect_unseen_are_hidden(); }

TEST(BackwardScoresNatural, masked_keys_are_hidden) { expect_masked_are_hidden(); }

TEST(BackwardScoresNatural, weights_are_probabilities) { expect_weights(); }

TEST(BackwardScoresNatural, logits_by_every_rule) { expect_logits(); }

TEST(BackwardScoresNatural, gradients_of_probabilities) { expect_gradient_of_probabilities(); }

TEST(BackwardScoresNatural, slopes) { expect_slopes(); }

TEST(BackwardScoresNatural, stored_where_products_read) { expect_stored_scores(); }

TEST(BackwardScoresNatural, dropped_as_philox_says) { expect_dropout(); }

}  // namespace narrows
}  // namespace backward_natural
