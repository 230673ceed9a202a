// The numerics of score.h: online softmax, LSE and the backward pass's probabilities.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "shared/score.h"
#include "tests/shared/std_math.hpp"

namespace narrows {
namespace {

using Math = test::StdMath<float>;
using test::kNan, test::kNegInf;

struct Row {
  std::vector<float> probabilities;
  float lse;
};

// As a blocked forward pass does it, keeping the weights instead of multiplying them with V.
Row online(const Units<float>& units, const std::vector<float>& scores, std::size_t block) {
  Reference<float> reference;
  float sum = 0;
  std::vector<float> weights;
  for (std::size_t begin = 0; begin < scores.size(); begin += block) {
    const std::size_t end = std::min(begin + block, scores.size());
    float maximum = reference.maximum;
    for (std::size_t j = begin; j < end; ++j) maximum = max_of(maximum, scores[j] * units.sign);
    const Reference<float> next = reference_of<Math>(units, maximum);
    const float factor = std::exp2(rescale_exponent<Math>(units, reference, next));
    sum *= factor;
    for (float& w : weights) w *= factor;
    for (std::size_t j = begin; j < end; ++j) {
      weights.push_back(std::exp2(weight_exponent<Math>(units, next, scores[j] * units.sign)));
      sum += weights.back();
    }
    reference = next;
  }
  for (float& w : weights) w *= normalizer(sum);
  return {weights, log_sum_exp<Math>(units, reference, sum)};
}

// c is the fp32 number that the contract names; everything else is exact.
void expect_exact(const Units<float>& units, const std::vector<float>& scores, const Row& row) {
  const auto exponent = [&](float s) { return static_cast<long double>(s) * units.sign * units.c; };
  long double largest = -INFINITY, sum = 0;
  for (const float s : scores) largest = std::max(largest, exponent(s));
  for (const float s : scores) sum += std::exp2(exponent(s) - largest);
  for (std::size_t j = 0; j < scores.size(); ++j) {
    ASSERT_NEAR(row.probabilities[j], static_cast<double>(std::exp2(exponent(scores[j]) - largest) / sum), 3e-6)
        << scores[j];
  }
  const double lse = static_cast<double>((largest + std::log2(sum)) * std::log(2.0L));
  ASSERT_NEAR(row.lse, lse, 1e-6 + 3e-7 * std::abs(lse));
}

TEST(Softmax, online_rows_equal_long_double_near_and_across_the_limit) {
  std::mt19937 engine(11);
  std::normal_distribution<float> normal;
  int far_rows = 0, crossings = 0;
  for (int repeat = 0; repeat < 20000; ++repeat) {
    const double scale = std::array{1.0, 0.125, -0.5, 3.0}[static_cast<std::size_t>(repeat % 4)];
    const Units<float> units = fused_units<float>(scale);
    // Exponents of 1, 2^23.9 .. 2^24.1 and 2^30, growing or falling through the row by several limits' rounding.
    const double size = std::array{1.0, 1.6e7, 1.6777216e7, 1.7e7, 1e9}[static_cast<std::size_t>(repeat % 5)];
    const double direction = repeat % 3 - 1;
    std::vector<float> scores(40);
    for (std::size_t j = 0; j < scores.size(); ++j) {
      const double exponent = (repeat % 2 == 0 ? size : -size) + direction * (static_cast<double>(j) - 20) * 5;
      scores[j] = static_cast<float>((exponent + normal(engine) * 4) / (units.c * units.sign));
      if ((j + static_cast<std::size_t>(repeat)) % 11 == 0) scores[j] = kNegInf * units.sign;
    }
    ASSERT_NO_FATAL_FAILURE(
        expect_exact(units, scores, online(units, scores, 1 + static_cast<std::size_t>(repeat % 17))));
    const auto far = [&](float s) { return std::abs(s * units.c) > kFar && std::isfinite(s); };
    const auto count = std::count_if(scores.begin(), scores.end(), far);
    far_rows += count == 0 ? 0 : 1;
    crossings += count != 0 && count < 30 ? 1 : 0;
  }
  EXPECT_GT(far_rows, 5000);
  EXPECT_GT(crossings, 500);
}

TEST(Softmax, natural_units_equal_long_double) {
  std::mt19937 engine(12);
  std::normal_distribution<float> normal;
  for (int repeat = 0; repeat < 2000; ++repeat) {
    std::vector<float> logits(30);
    for (float& x : logits) x = normal(engine) * 20 + (repeat % 2 == 0 ? 0.f : 3e7f);
    if (repeat % 3 == 0) std::fill_n(logits.begin(), 20, kNegInf);
    ASSERT_NO_FATAL_FAILURE(expect_exact(natural_units<float>(), logits, online(natural_units<float>(), logits, 7)));
  }
}

TEST(Softmax, B04_products_of_133120) {
  const float s = 64 * 133120.f * 133120.f;
  EXPECT_EQ(online(fused_units<float>(0.125), {s, s}, 1).probabilities, (std::vector<float>{0.5f, 0.5f}));
}

TEST(Softmax, B01_every_key_at_minus_524288) {
  const Row row = online(fused_units<float>(1 / std::sqrt(128.0)), {-524288.f, -524288.f}, 1);
  EXPECT_EQ(row.probabilities, (std::vector<float>{0.5f, 0.5f}));
  EXPECT_NEAR(row.lse, -46340.95 + std::log(2.0), 5e-3);
}

TEST(Softmax, logits_of_1e30) {
  for (const Units<float>& units : {fused_units<float>(1), natural_units<float>()}) {
    for (const std::size_t block : {1u, 2u, 3u}) {
      const Row row = online(units, {-1e30f, 1e30f, 1e30f, kNegInf, 0.f}, block);
      EXPECT_EQ(row.probabilities, (std::vector<float>{0.f, 0.5f, 0.5f, 0.f, 0.f}));
      EXPECT_EQ(row.lse, 1e30f);
      const Row low = online(units, {kNegInf, -1e30f, -3e38f}, block);
      EXPECT_EQ(low.probabilities, (std::vector<float>{0.f, 1.f, 0.f}));
      EXPECT_EQ(low.lse, -1e30f);
    }
  }
}

TEST(Softmax, A11_rows_of_the_lowest_finite_float) {
  const float lowest = std::numeric_limits<float>::lowest();
  for (const Units<float>& units : {fused_units<float>(1), natural_units<float>(), fused_units<float>(8)}) {
    const Row row = online(units, {lowest, lowest, lowest, lowest}, 3);
    EXPECT_EQ(row.probabilities, (std::vector<float>{0.25f, 0.25f, 0.25f, 0.25f}));
  }
}

TEST(Softmax, B09_scale_zero_and_negative) {
  for (const double scale : {0.0, -0.0, 1e-60}) {
    const Units<float> zero = fused_units<float>(scale);
    ASSERT_TRUE(zero.sign == 0.f && zero.c > 0.f);
    const Row row = online({1.f, zero.c, zero.scale, false}, {5.f * zero.sign, kNegInf, -3e38f * zero.sign}, 1);
    EXPECT_EQ(row.probabilities, (std::vector<float>{0.5f, 0.f, 0.5f}));
    EXPECT_FLOAT_EQ(row.lse, std::log(2.f));
  }
  const Row negative = online(fused_units<float>(-1), {3.f, 1.f}, 1);
  EXPECT_NEAR(negative.probabilities[1], 1 / (1 + std::exp(-2.0)), 1e-6);
  EXPECT_NEAR(negative.lse, -1 + std::log1p(std::exp(-2.0)), 1e-6);
}

TEST(Softmax, empty_is_a_sum_of_zero_and_nan_is_not_empty) {
  for (const Units<float>& units : {fused_units<float>(1), natural_units<float>()}) {
    const Row empty = online(units, {kNegInf, kNegInf, kNegInf}, 2);
    EXPECT_EQ(empty.probabilities, (std::vector<float>{0.f, 0.f, 0.f}));
    EXPECT_EQ(empty.lse, kNegInf);
    for (const std::vector<float>& scores : {std::vector<float>{kNan}, {kNan, 1.f}, {1.f, kNan}, {kNan, kNegInf}}) {
      EXPECT_TRUE(std::isnan(online(units, scores, 1).lse));
    }
  }
}

struct ApproximateLog2 : Math {
  static float log2(float x) { return x < 1e-30f ? -126.f : std::log2(x); }
};

TEST(Softmax, empty_does_not_rest_on_the_log2_of_zero) {
  EXPECT_EQ(log_sum_exp<ApproximateLog2>(fused_units<float>(1), {}, 0.f), kNegInf);
}

// A reference whose M is not maximum * c shows whether anything computes that product a second time.
TEST(Softmax, the_rounded_reference_is_never_recomputed) {
  const Units<float> units = fused_units<float>(1);
  const Reference<float> reference{100.f, 0.f, 150.f}, next{110.f, 0.f, 170.f};
  EXPECT_EQ(weight_exponent<Math>(units, reference, 90.f), std::fma(90.f, units.c, -150.f));
  EXPECT_EQ(rescale_exponent<Math>(units, reference, next), -20.f);
  EXPECT_EQ(log_sum_exp<Math>(units, reference, 4.f), 152 * static_cast<float>(kLn2));
}

TEST(Softmax, natural_units_refer_to_the_maximum_itself) {
  for (float maximum = 0.1f; maximum < 1e9f; maximum *= 1.3f) {
    const Reference<float> reference = reference_of<Math>(natural_units<float>(), maximum);
    EXPECT_EQ(weight_exponent<Math>(natural_units<float>(), reference, maximum), 0.f);
    EXPECT_EQ(log_sum_exp<Math>(natural_units<float>(), reference, 1.f), maximum);
  }
}

// The first keys of a row whose maximum lies below -128 must not be brought in by a factor of infinity times 0.
TEST(Softmax, nothing_summed_yet_is_rescaled_by_zero) {
  const Units<float> units = fused_units<float>(1);
  for (const float maximum : {-1e3f, -1.1e7f, -1e9f, kNegInf, 5.f}) {
    EXPECT_EQ(rescale_exponent<Math>(units, {}, reference_of<Math>(units, maximum)), kNegInf);
  }
}

TEST(Softmax, rescaling_between_all_pairs_of_forms) {
  const Units<float> units = fused_units<float>(0.7);
  const std::vector<float> exponents{-16777219.f, -16777216.f, -16777213.f, -100.f, 16777210.f, 16777220.f, 16777240.f};
  for (const float a : exponents) {
    for (const float b : exponents) {
      const Reference<float> old = reference_of<Math>(units, a / units.c);
      const Reference<float> current = reference_of<Math>(units, b / units.c);
      const auto exact = [&](const auto& r) { return static_cast<long double>(r.base) * units.c + r.subtrahend; };
      const double expected = static_cast<double>(exact(old) - exact(current));
      EXPECT_NEAR(rescale_exponent<Math>(units, old, current), expected, 1e-7 * std::abs(expected));
      EXPECT_EQ(rescale_exponent<Math>(units, old, old), 0.f);
    }
  }
}

float probability(const Units<float>& units, float lse, float s) {
  return std::exp2(probability_exponent<Math>(backward_reference<Math>(units, lse), s));
}

TEST(BackwardProbability, equals_the_forward_up_to_the_lse_rounding) {
  std::mt19937 engine(13);
  std::normal_distribution<float> normal;
  for (int repeat = 0; repeat < 20000; ++repeat) {
    const Units<float> units =
        repeat % 4 == 0 ? natural_units<float>() : fused_units<float>(repeat % 4 == 1 ? 1 : 0.25);
    const float center = std::array{0.f, -300.f, 8.3e6f, -8.5e6f, 1e9f}[static_cast<std::size_t>(repeat % 5)];
    std::vector<float> scores(16);
    for (float& s : scores) s = (center + normal(engine) * 3) / units.scale;
    const Row row = online(units, scores, 5);
    for (std::size_t j = 0; j < scores.size(); ++j) {
      const double p = probability(units, row.lse, scores[j]);
      const double error = 4e-6 + 4 * std::abs(row.lse) * std::ldexp(1, -24);
      ASSERT_NEAR(p, row.probabilities[j], error * std::max<double>(p, row.probabilities[j])) << repeat;
      ASSERT_LE(p, 1.0);
    }
  }
}

TEST(BackwardProbability, the_only_key_has_exactly_one_where_the_lse_is_far) {
  for (const double scale : {0.3, 0.125, 1.7}) {
    const Units<float> units = fused_units<float>(scale);
    for (float s = 1e8f; s < 1e30f; s *= 1.7f) {
      EXPECT_EQ(probability(units, online(units, {s}, 1).lse, s), 1.f) << s;
      EXPECT_EQ(probability(units, online(units, {-s}, 1).lse, -s), 1.f) << s;
    }
  }
}

TEST(BackwardProbability, empty_rows_weigh_nothing_and_nan_stays) {
  for (const Units<float>& units : {fused_units<float>(1), natural_units<float>()}) {
    for (const float s : {0.f, 1e30f, -1e30f, kNegInf}) EXPECT_EQ(probability(units, kNegInf, s), 0.f);
    EXPECT_EQ(probability(units, 3.f, kNegInf), 0.f);
    EXPECT_EQ(probability(units, 3e7f, kNegInf), 0.f);
    EXPECT_EQ(probability(units, 3.f, 5.f), 1.f) << "rounding must not lift a probability above 1";
    for (const float lse : {3.f, 3e7f}) EXPECT_TRUE(std::isnan(probability(units, lse, kNan)));
    EXPECT_TRUE(std::isnan(probability(units, kNan, 1.f)));
  }
}

}  // namespace
}  // namespace narrows
