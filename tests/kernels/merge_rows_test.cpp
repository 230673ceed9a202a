// A row of several parts as one warp joins it, and its gradients, against sums in double.
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
#include "kernels/merge_gradients.cuh"
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

/// Gradients of all that a merge takes, where they are wanted.
struct GradientsOfTest : PartsOfTest {
  std::vector<float> dout = std::vector<float>(merged_o.size()), dlse = std::vector<float>(merged_lse.size()), part_o,
                     part_lse, dsinks = std::vector<float>(kHeadsOfTest, kNan);
  std::vector<MergedRow> merged = std::vector<MergedRow>(kRowsOfTest * kHeadsOfTest);

  GradientsOfTest(i32 count_, unsigned seed)
      : PartsOfTest(count_, seed), part_o(o.size(), kNan), part_lse(lse.size(), kNan) {
    std::mt19937 random(seed + 100);
    std::normal_distribution<float> normal;
    for (std::vector<float>* all : {&dout, &dlse})
      for (float& x : *all) x = normal(random);
  }

  /// first: of the parts whose gradients are made.
  MergeBackwardArgs backward_args(bool with_sinks, bool with_dlse, i32 first = 0) {
    const MergeArgs forward = args(with_sinks);
    MergeBackwardArgs all;
    std::copy_n(forward.parts + first, count - first, all.parts);
    all.dout = forward.out.o, all.dout.data = reinterpret_cast<char*>(dout.data());
    if (with_dlse) all.dlse = forward.out.lse, all.dlse.data = reinterpret_cast<char*>(dlse.data());
    all.sinks = all.dsinks = forward.sinks;
    all.dsinks.data = reinterpret_cast<char*>(dsinks.data());
    all.merged = merged.data();
    all.count = count - first;
    all.value_dim = kColumnsOfTest;
    all.batch = 1, all.rows = kRowsOfTest, all.heads = kHeadsOfTest;
    return all;
  }
  void run(bool with_sinks, bool with_dlse) {
    const MergeBackwardArgs rows = backward_args(with_sinks, with_dlse);
    Warp warp(0);
    warp.run([&](int) {
      for (i64 i = 0; i < kRowsOfTest; ++i)
        for (i64 h = 0; h < kHeadsOfTest; ++h) share_row(rows, 0, i, h);
    });
    for (i32 first = 0; first < count; first += kGradientsAt) {
      MergeBackwardArgs some = backward_args(with_sinks, with_dlse, first);
      some.count = min_of(count - first, kGradientsAt);
      for (i32 part = 0; part < some.count; ++part) {
        MergePart& gradient = some.parts[kGradientsAt + part];
        gradient = some.parts[part];
        gradient.o.data += reinterpret_cast<char*>(part_o.data()) - reinterpret_cast<char*>(o.data());
        gradient.lse.data += reinterpret_cast<char*>(part_lse.data()) - reinterpret_cast<char*>(lse.data());
        if (first + part == 1) gradient.o.data = nullptr;  // not wanted
        if (first + part == 2) gradient.lse.data = nullptr;
      }
      warp.run([&](int) {
        for (i64 i = 0; i < kRowsOfTest; ++i)
          for (i64 h = 0; h < kHeadsOfTest; ++h) part_gradients(some, 0, i, h);
      });
    }
    if (with_sinks)
      warp.run([&](int) {
        for (i64 h = 0; h < kHeadsOfTest; ++h) sink_gradient(rows, h);
      });
  }

  /// By the definition.
  void expect_all(bool with_sinks, bool with_dlse) {
    for (i32 h = 0; h < kHeadsOfTest; ++h) {
      double sink_sum = 0;
      for (i32 i = 0; i < kRowsOfTest; ++i) sink_sum += expect_gradients(i, h, with_sinks, with_dlse);
      if (!with_sinks) continue;
      ASSERT_NEAR(dsinks[static_cast<std::size_t>(h)], sink_sum, 1e-5);
    }
  }
  /// Its part of the sink's gradient.
  double expect_gradients(i32 i, i32 h, bool with_sinks, bool with_dlse) {
    const double sink = with_sinks ? double{sinks[static_cast<std::size_t>(h)]} : -HUGE_VAL;
    const auto at = static_cast<std::size_t>((i * kHeadsOfTest + h) * kColumnsOfTest);
    double total = std::exp(sink), dot = 0;
    std::vector<double> weights, dots;
    for (i32 part = 0; part < count; ++part) total += std::exp(double{lse_of(part, i, h)});
    for (i32 part = 0; part < count; ++part) {
      weights.push_back(total == 0 ? 0 : std::exp(double{lse_of(part, i, h)}) / total);
      double own = 0;
      for (i32 x = 0; x < kColumnsOfTest; ++x)
        own += double{dout[at + static_cast<std::size_t>(x)]} * double{o_row(part, i, h)[x]};
      dots.push_back(weights.back() == 0 ? 0 : own);
      dot += weights.back() * dots.back();
    }
    const double shared = (with_dlse ? double{dlse[static_cast<std::size_t>(h * kRowsOfTest + i)]} : 0) - dot;
    for (i32 part = 0; part < count; ++part) {
      const double weight = weights[static_cast<std::size_t>(part)];
      const float* const found = part_o.data() + (o_row(part, i, h) - o.data());
      for (i32 x = 0; x < kColumnsOfTest; ++x) {
        if (part == 1) {
          EXPECT_TRUE(std::isnan(found[x])) << "it was not wanted";
        } else {
          EXPECT_NEAR(found[x], weight * double{dout[at + static_cast<std::size_t>(x)]}, 4e-6) << "part " << part;
        }
      }
      const float found_lse = part_lse[static_cast<std::size_t>(&lse_of(part, i, h) - lse.data())];
      if (part == 2) {
        EXPECT_TRUE(std::isnan(found_lse)) << "it was not wanted";
      } else {
        EXPECT_NEAR(found_lse, weight * (dots[static_cast<std::size_t>(part)] + shared), 2e-5) << "part " << part;
      }
    }
    return total == 0 ? 0 : std::exp(sink) / total * shared;
  }
};

TEST(MergeRows, gradients_of_any_number_of_parts) {
  for (const i32 count : {1, 3, 16, 17, 32})
    for (const bool with_sinks : {false, true}) {
      GradientsOfTest gradients(count, static_cast<unsigned>(count));
      gradients.run(with_sinks, count % 2 == 1);
      ASSERT_NO_FATAL_FAILURE(gradients.expect_all(with_sinks, count % 2 == 1)) << count << " parts";
    }
}

TEST(MergeRows, empty_parts_have_no_gradient_whatever_they_hold) {
  for (const bool with_sinks : {false, true}) {
    GradientsOfTest gradients(5, 1);
    for (const i32 part : {0, 3}) gradients.empty(part, 1, 0);
    for (i32 part = 0; part < 5; ++part) gradients.empty(part, 2, 1);
    gradients.run(with_sinks, true);
    ASSERT_NO_FATAL_FAILURE(gradients.expect_all(with_sinks, true));
  }
}

}  // namespace narrows
}  // namespace merging
