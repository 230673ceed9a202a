// Values at the edges of the types.
#include <gtest/gtest.h>

#include "tests/cpu/forward_run.hpp"
#include "tests/support/check.hpp"

#include <cmath>

namespace narrows::test {
namespace {

void expect_agreement(Attention& a) {
  for (const std::string& set : instruction_sets()) {
    a.o.poison();
    a.lse.poison();
    run_forward(a, {set, 2, 24, 32, 2});
    EXPECT_TRUE(forward_agrees(a.in(), a.out(), a.options)) << set;
  }
}

TEST(CpuForward, B01_huge_negative_logits_of_every_key) {
  Attention a({1, 1, 2, 1, 1, 128, 8}, DType::bf16);
  a.q.fill([](const Dims& at) { return at[3] == 0 ? 1024 : 0; });
  a.k.fill([](const Dims& at) { return at[3] == 0 ? -512 : 0; });
  a.v.fill(1);
  run_forward(a);
  EXPECT_EQ((a.o[{0, 0, 0, 5}]), 1);
  EXPECT_NEAR((a.lse[{0, 0, 0}]), -524288 / std::sqrt(128.0) + std::log(2.0), 0.01);
}

TEST(CpuForward, B03_rows_of_large_negative_logits) {
  Attention a({1, 5, 90, 4, 2, 128, 16}, DType::bf16);
  a.q.fill([](const Dims& at) { return 448.0 - static_cast<double>((at[1] + at[3]) % 5); });
  a.k.fill([](const Dims& at) { return -static_cast<double>((at[1] * 7 + at[3]) % 1880) / 100; });
  expect_agreement(a);
}

TEST(CpuForward, B04_133120_in_bf16_gives_v) {
  for (const std::int64_t keys : {1, 3, 40}) {
    Attention a({1, 1, keys, 1, 1, 64, 64}, DType::bf16);
    for (Array* array : {&a.q, &a.k, &a.v}) array->fill(133120);
    for (const std::string& set : instruction_sets()) {
      a.o.poison();
      run_forward(a, {.instruction_set = set});
      a.o.for_each([&](const Dims& at) { EXPECT_EQ(a.o[at], 133120) << set; });
    }
  }
}

TEST(CpuForward, logits_of_1e30_behave) {
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp64})
    for (const double sign : {1.0, -1.0}) {
      Attention a({1, 4, 70, 1, 1, 8, 8}, dtype);
      a.q.fill(1e15);
      a.k.fill([&](const Dims& at) {
        return at[1] % 7 == 2 ? sign * 1e15 : at[1] % 7 == 4 ? -sign * 1e15 : at[3] % 2 ? 1e15 : -1e15;
      });
      run_forward(a);
      for (std::int64_t x = 0; x < 8; ++x) {
        double mean = 0;
        for (std::int64_t j = sign > 0 ? 2 : 4; j < 70; j += 7) mean += a.v[{0, j, 0, x}] / 10;
        EXPECT_NEAR((a.o[{0, 1, 0, x}]), mean, 1e-2 * std::abs(mean) + 1e-3);
      }
      const double q = a.q[{0, 2, 0, 0}], logit = 8 * q * q / std::sqrt(8.0);
      EXPECT_NEAR((a.lse[{0, 0, 2}]), logit, 1e-6 * logit);
    }
}

// |M| crosses 2^24 between tiles in every direction: rows go from near to far and far rows rise.
TEST(CpuForward, references_pass_between_near_and_far) {
  for (const bool negative : {false, true})
    for (const double size : {1e3, 1.2e7, 2e7, 5e8, 1e20}) {
      Attention a({1, 6, 130, 2, 1, 4, 8});
      a.options.scale = negative ? -1.0 : 1.0;
      a.q.fill([&](const Dims& at) { return at[3] == 0 ? (negative ? -1 : 1) : 0; });
      a.k.fill([&](const Dims& at) {
        const std::int64_t tile = at[1] / 32;
        return (tile == 0   ? -size
                : tile == 1 ? -size / 3
                : tile == 2 ? 1.0
                            : size) +
               static_cast<double>(at[1] % 5) * size / 1e7;
      });
      expect_agreement(a);
      a.options.causal = Causal::bottom_right;
      expect_agreement(a);
    }
}

TEST(CpuForward, B06_biases_of_very_large_size_are_added_in_fp32) {
  Attention a({1, 7, 50, 2, 2, 16, 16}, DType::bf16);
  Array bias = Array(DType::fp32, {7, 50}).fill([](const Dims& at) {
    return at[1] % 3 == 0 ? -1e9 : 1000 + static_cast<double>(at[0]) / 16;
  });
  a.options.bias = bias;
  expect_agreement(a);
}

TEST(CpuForward, A11_lowest_finite_biases_are_no_mask) {
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp64}) {
    Attention a({1, 4, 40, 1, 1, 8, 8}, dtype);
    const double lowest =
        dtype == DType::fp64 ? std::numeric_limits<double>::lowest() : std::numeric_limits<float>::lowest();
    Array bias = Array(dtype == DType::fp64 ? DType::fp64 : DType::fp32, {4, 40}).fill([&](const Dims& at) {
      return at[0] == 0 || (at[0] == 1 && at[1] < 20) ? lowest : at[0] == 2 ? (at[1] < 20 ? lowest : -kInfinite) : 0.25;
    });
    a.options.bias = bias;
    expect_agreement(a);
    run_forward(a);
    double first = 0;
    for (std::int64_t j = 0; j < 40; ++j) first += a.v[{0, j, 0, 3}] / 40;
    EXPECT_NEAR((a.o[{0, 0, 0, 3}]), first, 0.01) << "scores vanish beside the fill: uniform";
  }
}

TEST(CpuForward, B09_scale_zero_is_uniform_and_negative_scales_keep_keys_masked) {
  Array mask = Array(DType::boolean, {30, 70}).fill([](const Dims& at) { return (at[0] + at[1]) % 3 ? 1 : 0; });
  for (const double scale : {0.0, -0.0, -1.0, -1e-3, 1e-60, -1e30, 3e38, -1e300})
    for (const bool rules : {false, true}) {
      Attention a({1, 30, 70, 2, 1, 8, 8}, DType::fp32);
      a.options.scale = scale;
      a.options.causal = Causal::bottom_right;
      a.options.mask = mask;
      if (rules) a.options.softcap = 3;
      run_forward(a);
      if (std::abs(scale) <= 1) expect_agreement(a);
      double count = 0, mean = 0;
      for (std::int64_t j = 0; j <= 50; ++j)
        if ((10 + j) % 3) {
          count += 1;
          mean += a.v[{0, j, 0, 2}];
        }
      if (scale == 0 || scale == 1e-60) {
        EXPECT_NEAR((a.lse[{0, 1, 10}]), std::log(count), 1e-5);
        EXPECT_NEAR((a.o[{0, 10, 1, 2}]), mean / count, 1e-5);
      }
      a.o.for_each([&](const Dims& at) { EXPECT_TRUE(std::isfinite(a.o[at])) << scale; });
    }
}

TEST(CpuForward, J04_sinks_far_from_the_logits) {
  for (const double sink : {-1e4, 1e4, 1e30, -1e30}) {
    Attention a({1, 3, 40, 1, 1, 8, 8});
    Array sinks(DType::fp32, {1}, std::vector<double>{sink});
    a.options.sinks = sinks;
    expect_agreement(a);
    for (const double size : {1e4, 1e7}) {
      a.q.fill(size);
      expect_agreement(a);
    }
  }
}

}  // namespace
}  // namespace narrows::test
