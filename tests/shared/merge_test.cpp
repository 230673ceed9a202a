#include "shared/merge.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "tests/shared/std_math.hpp"

namespace narrows {
namespace {

using Math = test::StdMath<float>;
using test::kNan, test::kNegInf;

struct Part {
  float output;
  float lse;
};

Part merge_parts(const std::vector<Part>& parts, float sink = kNegInf) {
  std::vector<float> lse;
  for (const Part& part : parts) lse.push_back(part.lse);
  const Merge<float> merge = merge_of<Math>(lse.data(), static_cast<i64>(lse.size()), 1, sink);
  float output = 0;
  for (const Part& part : parts) output += contribution(part_weight<Math>(merge, part.lse), part.output);
  return {output, merged_lse<Math>(merge)};
}

Part exactly(const std::vector<Part>& parts, double sink = -INFINITY) {
  long double largest = sink;
  for (const Part& part : parts) largest = std::max<long double>(largest, part.lse);
  long double sum = std::exp(sink - largest), output = 0;
  for (const Part& part : parts) sum += std::exp(part.lse - largest);
  for (const Part& part : parts) output += part.output * std::exp(part.lse - largest) / sum;
  return {static_cast<float>(output), static_cast<float>(largest + std::log(sum))};
}

TEST(Merge, A02_empties_make_an_empty) {
  for (const std::size_t count : {0u, 1u, 2u, 5u}) {
    const Part result = merge_parts(std::vector<Part>(count, {0.f, kNegInf}));
    EXPECT_EQ(result.output, 0.f);
    EXPECT_EQ(result.lse, kNegInf);
  }
}

TEST(Merge, A04_an_unwritten_output_of_an_empty_part_is_left_out) {
  const Part result = merge_parts({{kNan, kNegInf}, {3.f, 1.25f}, {kNan, kNegInf}});
  EXPECT_EQ(result.output, 3.f);
  EXPECT_EQ(result.lse, 1.25f);
  EXPECT_EQ(merge_parts({{kNan, kNegInf}, {kNan, kNegInf}}).output, 0.f);
}

TEST(Merge, a_nan_stays) {
  for (const std::vector<Part>& parts :
       {std::vector<Part>{{1.f, kNan}, {2.f, 0.f}}, {{2.f, 0.f}, {1.f, kNan}}, {{1.f, kNan}, {0.f, kNegInf}}}) {
    const Part result = merge_parts(parts);
    EXPECT_TRUE(std::isnan(result.output));
    EXPECT_TRUE(std::isnan(result.lse));
  }
  EXPECT_TRUE(std::isnan(merge_parts({{kNan, 1.f}, {2.f, 0.f}}).output));
}

TEST(Merge, A16_a_sink_counts_once_and_weighs_no_output) {
  const Part empty = merge_parts({{0.f, kNegInf}, {0.f, kNegInf}}, 0.5f);
  EXPECT_EQ(empty.output, 0.f);
  EXPECT_EQ(empty.lse, 0.5f);
  EXPECT_NEAR(merge_parts({{1.f, 1.f}, {2.f, -1.f}}, 100.f).lse, 100.f, 1e-5f);
  const Part half = merge_parts({{4.f, 2.f}}, 2.f);
  EXPECT_EQ(half.output, 2.f);
  EXPECT_NEAR(half.lse, 2 + std::log(2.f), 1e-6f);
  const Part several = merge_parts({{1.f, 0.f}, {5.f, 0.f}, {3.f, 0.f}}, 0.f);
  EXPECT_NEAR(several.output, 9.f / 4, 1e-6f);
  EXPECT_NEAR(several.lse, std::log(4.f), 1e-6f);
}

TEST(Merge, J04_lse_differences_of_ten_thousand) {
  for (const float difference : {1e4f, -1e4f, 3e38f}) {
    const Part result = merge_parts({{7.f, difference}, {-2.f, 0.f}});
    EXPECT_EQ(result.output, difference > 0 ? 7.f : -2.f);
    EXPECT_EQ(result.lse, std::max(difference, 0.f));
  }
  EXPECT_EQ(merge_parts({{7.f, kInfinity<float>}, {-2.f, 3.f}}).output, 7.f);
  EXPECT_EQ(merge_parts({{7.f, kInfinity<float>}, {-1.f, kInfinity<float>}}).output, 3.f);
  EXPECT_EQ(merge_parts({{7.f, kInfinity<float>}, {-2.f, 3.f}}).lse, kInfinity<float>);
}

TEST(Merge, weights_of_large_lse_sum_to_one) {
  const Part result = merge_parts({{1.f, 1048576.f}, {1.f, 1048576.f}, {1.f, 1048575.f}});
  EXPECT_NEAR(result.output, 1.f, 2e-7f);
}

TEST(Merge, random_parts_equal_long_double) {
  std::mt19937 engine(5);
  std::normal_distribution<float> normal;
  for (int repeat = 0; repeat < 20000; ++repeat) {
    std::vector<Part> parts(static_cast<std::size_t>(1 + repeat % 7));
    const float spread = std::pow(10.f, static_cast<float>(repeat % 5));
    for (Part& part : parts) part = {normal(engine), normal(engine) * spread};
    if (repeat % 3 == 0) parts.push_back({0.f, kNegInf});
    const float sink = repeat % 2 == 0 ? kNegInf : normal(engine);
    const Part result = merge_parts(parts, sink);
    const Part expected = exactly(parts, sink);
    ASSERT_NEAR(result.output, expected.output, 2e-6f);
    ASSERT_NEAR(result.lse, expected.lse, 1e-6f + 2e-7f * std::abs(expected.lse));
  }
}

TEST(Merge, strided_parts) {
  const float lse[] = {0.f, kNan, 1.f, kNan, 2.f, kNan};
  const Merge<float> merge = merge_of<Math>(lse, 3, 2, kNegInf);
  EXPECT_NEAR(merged_lse<Math>(merge), 2 + std::log(1 + std::exp(-1.f) + std::exp(-2.f)), 1e-6f);
}

RunningSum<float> sum_of(const Units<float>& units, const std::vector<float>& scores, std::size_t begin,
                         std::size_t end) {
  float maximum = kNegInf;
  for (std::size_t j = begin; j < end; ++j) maximum = std::max(maximum, scores[j]);
  RunningSum<float> row{reference_of<Math>(units, maximum), 0.f};
  for (std::size_t j = begin; j < end; ++j) {
    row.sum += Math::exp2(weight_exponent<Math>(units, row.reference, scores[j]));
  }
  return row;
}

// Splits of one row, some near and some far, joined in any order: the sum and each side's factor against one pass.
TEST(Merge, running_sums_join_to_the_sum_of_the_whole_row) {
  std::mt19937 engine(6);
  std::normal_distribution<float> normal;
  for (int repeat = 0; repeat < 20000; ++repeat) {
    const Units<float> units = repeat % 4 == 0 ? natural_units<float>() : fused_units<float>(1);
    const float center = std::ldexp(11629080.f, repeat % 3 - 1);  // times log2(e): 2^23, 2^24, 2^25
    std::vector<float> scores(12);
    for (float& s : scores) s = center * (repeat % 2 == 0 ? 1.f : -1.f) + std::round(normal(engine) * 8);
    if (repeat % 5 == 0) std::fill(scores.begin(), scores.begin() + 6, kNegInf);
    const RunningSum<float> left = sum_of(units, scores, 0, 6);
    const RunningSum<float> right = sum_of(units, scores, 6, 12);
    const RunningSum<float> whole = sum_of(units, scores, 0, 12);
    for (const JoinedSum<float>& both : {joined<Math>(units, left, right), joined<Math>(units, right, left)}) {
      ASSERT_EQ(both.row.reference.maximum, whole.reference.maximum);
      ASSERT_NEAR(both.row.sum, whole.sum, 4e-6f * whole.sum) << repeat;
    }
  }
  const JoinedSum<float> empty = joined<Math>(fused_units<float>(1), {}, {});
  EXPECT_EQ(empty.row.sum, 0.f);
  EXPECT_EQ(empty.row.reference.maximum, kNegInf);
  EXPECT_EQ(empty.left_factor, 0.f);
}

}  // namespace
}  // namespace narrows
