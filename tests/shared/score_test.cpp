#include "shared/score.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/shared/std_math.hpp"

namespace narrows {
namespace {

using Math = test::StdMath<float>;
using test::kNan, test::kNegInf;

static_assert(static_cast<double>(kInfinity<float>) == std::numeric_limits<double>::infinity());
static_assert(kLargest<float> == std::numeric_limits<float>::max());
static_assert(kLargest<double> == std::numeric_limits<double>::max());
static_assert(kFar == 1 << 24 && kFarLse == 1 << 23);
static_assert(distance(3, 7) == 4 && distance(7, 3) == 4 && distance(-(i64{1} << 40), i64{1} << 40) == i64{1} << 41);

TEST(Score, rules_apply_in_the_contracts_order) {
  using Exact = test::StdMath<double>;
  const ScoreRules<double> rules = score_rules<double>(0.125, 30, 0.25);
  const double expected = 30 * std::tanh(100 * 0.125 / 30) - 0.25 * 6 + 1.5;
  EXPECT_NEAR(logit<Exact>(100.0, rules, 6.0, 1.5), expected, 1e-14);
  EXPECT_EQ(logit<Exact>(100.0, score_rules<double>(-0.125, 0, 0.0), 6.0, 0.0), -12.5);
  EXPECT_EQ(logit<Math>(4.f, score_rules<float>(0.5, 0, 2.f), 3.f, kNegInf), kNegInf);
  EXPECT_EQ(logit<Math>(4.f, score_rules<float>(0, 0, 0.f), 3.f, 0.f), 0.f);
}

TEST(Score, I02_softcap_bounds_the_logit) {
  const ScoreRules<float> rules = score_rules<float>(1, 20, 0.f);
  EXPECT_EQ(logit<Math>(1e30f, rules, 0.f, 0.f), 20.f);
  EXPECT_EQ(logit<Math>(-kInfinity<float>, rules, 0.f, 0.f), -20.f);
  EXPECT_NEAR(logit<Math>(10.f, rules, 0.f, 0.f), 20 * std::tanh(0.5), 1e-6);
  EXPECT_TRUE(std::isnan(logit<Math>(kNan, rules, 0.f, 0.f)));
}

TEST(Score, I02_softcap_derivative_is_that_of_the_forward) {
  using Exact = test::StdMath<double>;
  const ScoreRules<double> rules = score_rules<double>(1, 7, 0.0);
  for (double x = -40; x < 40; x += 0.37) {
    const double h = 1e-5;
    const double slope = (logit<Exact>(x + h, rules, 0.0, 0.0) - logit<Exact>(x - h, rules, 0.0, 0.0)) / (2 * h);
    EXPECT_NEAR(softcap_derivative(std::tanh(x / 7)), slope, 1e-9);
  }
  EXPECT_EQ(softcap_derivative(1.f), 0.f);
  for (float t = 0; t < 1; t += 0.0009765f) {
    const double exact = (1 - double{t}) * (1 + double{t});
    EXPECT_NEAR(softcap_derivative(t), exact, 2e-7 * exact);
  }
}

TEST(Score, finite_options_stay_finite_in_fp32) {
  EXPECT_EQ(score_rules<float>(1e300, 0, 0.f).scale, std::numeric_limits<float>::max());
  EXPECT_EQ(score_rules<float>(-1e300, 0, 0.f).scale, std::numeric_limits<float>::lowest());
  EXPECT_EQ(logit<Math>(0.f, score_rules<float>(1, 1e-300, 0.f), 0.f, 0.f), 0.f);
  EXPECT_NEAR(logit<Math>(9.f, score_rules<float>(1, 1e-300, 0.f), 0.f, 0.f), 0.f, 2e-38);
  EXPECT_NEAR(logit<Math>(9.f, score_rules<float>(1, 1e30, 0.f), 0.f, 0.f), 9.f, 2e-6);
  EXPECT_TRUE(std::isfinite(fused_units<float>(1e300).c));
  EXPECT_TRUE(std::isfinite(fused_units<double>(1.7e308).c));
}

#if defined(__GNUC__)
using Vector = float __attribute__((vector_size(16)));

struct VectorMath : Math {
  using Math::fma;
  using Math::multiply;
  using Math::tanh;
  static Vector multiply(Vector a, float b) { return a * b; }
  static Vector fma(Vector a, float b, float c) {
    for (int i = 0; i < 4; ++i) a[i] = std::fma(a[i], b, c);
    return a;
  }
  static Vector tanh(Vector a) {
    for (int i = 0; i < 4; ++i) a[i] = std::tanh(a[i]);
    return a;
  }
};

TEST(Score, a_vector_of_scores_gives_the_bits_of_each) {
  const Vector s{-3.25f, 100.f, kNegInf, 7e8f}, away{0.f, 1.f, 2.f, 3.f}, bias{0.5f, 0.f, 1.f, -1.f};
  const ScoreRules<float> rules = score_rules<float>(0.3, 50, 0.5f);
  const Units<float> units = fused_units<float>(0.3);
  for (const float maximum : {100.f, 7e8f}) {
    const Reference<float> reference = reference_of<Math>(units, maximum);
    const BackwardReference<float> backward = backward_reference<Math>(units, maximum);
    const Vector logits = logit<VectorMath>(s, rules, away, bias);
    const Vector weights = weight_exponent<VectorMath>(units, reference, s);
    const Vector probabilities = probability_exponent<VectorMath>(backward, s);
    for (int i = 0; i < 4; ++i) {
      EXPECT_EQ(logits[i], logit<Math>(s[i], rules, away[i], bias[i]));
      EXPECT_EQ(weights[i], weight_exponent<Math>(units, reference, s[i]));
      EXPECT_EQ(probabilities[i], probability_exponent<Math>(backward, s[i]));
    }
  }
}
#endif

}  // namespace
}  // namespace narrows
