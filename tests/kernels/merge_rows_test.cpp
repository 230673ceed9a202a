// A row of several parts as one warp joins it, against sums in double.
#include <gtest/gtest.h>

#include <random>

#include "tests/kernels/device/device.hpp"
#include "tests/shared/std_math.hpp"

namespace merging {
#include "shared/merge_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::fp32;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"
#include "kernels/merge_rows.cuh"
#pragma GCC diagnostic pop

namespace narrows {

using ::narrows::test::kNan;
using ::narrows::test::Warp;

constexpr i32 kRowsOfTest = 3, kHeadsOfTest = 2, kColumnsOfTest = 45;
constexpr float kNothing = -kInfinity<float>;

struct PartsOfTest {
  i32 count;
  std::vector<float> o, lse, sinks{0.4f, kNothing};
  std::vector<float> merged_o = std::vector<float>(kRowsOfTest * kHeadsOfTest * kColumnsOfTest, kNan),
                     merged_lse = std::vector<float>(kHeadsOfTest * kRowsOfTest, kNan);

  PartsOfTest(i32 count_, unsigned seed) : count(count_) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (i32 i = 0; i < count * kRowsOfTest * kHeadsOfTest * kColumnsOfTest; ++i) o.push_back(normal(random));
    for (i32 i = 0; i < count * kHeadsOfTest * kRowsOfTest; ++i) lse.push_back(3 * normal(random));
  }
  float* o_row(i32 part, i32 i, i32 h) {
    return o.data() + ((part * kRowsOfTest + i) * kHeadsOfTest + h) * kColumnsOfTest;
  }
  float& lse_of(i32 part, i32 i, i32 h) {
    return lse[static_cast<std::size_t>((part * kHeadsOfTest + h) * kRowsOfTest + i)];
  }
  void empty(i32 part, i32 i, i32 h) {
    lse_of(part, i, h) = kNothing;
    std::fill_n(o_row(part, i, h), kColumnsOfTest, kNan);
  }

  MergeArgs args(bool with_sinks) {
    const auto rows = [](float* data) {
      return TensorArg{
          reinterpret_cast<char*>(data), {0, 4 * kHeadsOfTest * kColumnsOfTest, 4 * kColumnsOfTest, 4}, Element::fp32};
    };
    const auto numbers = [](float* data) {
      return TensorArg{reinterpret_cast<char*>(data), {0, 4 * kRowsOfTest, 4, 0}, Element::fp32};
    };
    MergeArgs args;
    for (i32 part = 0; part < count; ++part) args.parts[part] = {rows(o_row(part, 0, 0)), numbers(&lse_of(part, 0, 0))};
    args.out = {rows(merged_o.data()), numbers(merged_lse.data())};
    if (with_sinks) args.sinks = {reinterpret_cast<char*>(sinks.data()), {4, 0, 0, 0}, Element::fp32};
    args.count = count;
    args.value_dim = kColumnsOfTest;
    args.batch = 1, args.rows = kRowsOfTest, args.heads = kHeadsOfTest;
    return args;
  }

  void merge(bool with_sinks) {
    const MergeArgs all = args(with_sinks);
    Warp warp(0);
    warp.run([&](int) {
      for (i64 i = 0; i < kRowsOfTest; ++i)
        for (i64 h = 0; h < kHeadsOfTest; ++h) merge_row(all, 0, i, h);
    });
  }

  /// Weights in double; the sink has no row.
  void expect_row(i32 i, i32 h, bool with_sinks) {
    const double sink = with_sinks ? double{sinks[static_cast<std::size_t>(h)]} : -HUGE_VAL;
    double total = std::exp(sink);
    for (i32 part = 0; part < count; ++part) total += std::exp(double{lse_of(part, i, h)});
    const float lse_found = merged_lse[static_cast<std::size_t>(h * kRowsOfTest + i)];
    if (total == 0)
      EXPECT_EQ(lse_found, kNothing);
    else
      EXPECT_NEAR(lse_found, std::log(total), 4e-6);
    for (i32 x = 0; x < kColumnsOfTest; ++x) {
      double sum = 0;
      for (i32 part = 0; part < count; ++part)
        if (lse_of(part, i, h) != kNothing)
          sum += std::exp(double{lse_of(part, i, h)}) / total * double{o_row(part, i, h)[x]};
      ASSERT_NEAR(merged_o[static_cast<std::size_t>((i * kHeadsOfTest + h) * kColumnsOfTest + x)], sum, 4e-6) << x;
    }
  }
  void expect_all(bool with_sinks) {
    for (i32 i = 0; i < kRowsOfTest; ++i)
      for (i32 h = 0; h < kHeadsOfTest; ++h) expect_row(i, h, with_sinks);
  }
};

TEST(MergeRows, any_number_of_parts_with_and_without_sinks) {
  for (const i32 count : {0, 1, 7, 32})
    for (const bool with_sinks : {false, true}) {
      PartsOfTest parts(count, static_cast<unsigned>(count));
      parts.merge(with_sinks);
      ASSERT_NO_FATAL_FAILURE(parts.expect_all(with_sinks)) << count << " parts";
    }
}

TEST(MergeRows, empty_parts_are_left_out_whatever_they_hold) {
  for (const bool with_sinks : {false, true}) {
    PartsOfTest parts(5, 1);
    for (const i32 part : {0, 3}) parts.empty(part, 1, 0);
    for (i32 part = 0; part < 5; ++part) parts.empty(part, 2, 1);
    parts.merge(with_sinks);
    ASSERT_NO_FATAL_FAILURE(parts.expect_all(with_sinks));
  }
}

TEST(MergeRows, nan_stays_in_its_row_and_far_parts_weigh_nothing) {
  PartsOfTest parts(3, 2);
  parts.lse_of(1, 0, 1) = kNan;
  parts.lse_of(2, 1, 1) = 3e38f;
  parts.merge(false);
  const auto o = [&](i32 i, i32 h, i32 x) {
    return parts.merged_o[static_cast<std::size_t>((i * kHeadsOfTest + h) * kColumnsOfTest + x)];
  };
  EXPECT_TRUE(std::isnan(o(0, 1, 3)) && std::isnan(parts.merged_lse[kRowsOfTest]));
  EXPECT_EQ(o(1, 1, 44), parts.o_row(2, 1, 1)[44]);
  for (const i32 i : {0, 1, 2}) parts.expect_row(i, 0, false);
}

}  // namespace narrows
}  // namespace merging
