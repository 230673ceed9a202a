// Values that break kernels which are right on Gaussian noise.
#include "tests/gpu/device_call.hpp"
#include "tests/support/check.hpp"

#include <cmath>
#include <limits>

namespace narrows::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

class GpuValues : public OnGpu<testing::TestWithParam<std::tuple<DType, std::string>>> {
 protected:
  std::string_view family() const override { return std::get<1>(GetParam()); }
  static DType dtype() { return std::get<0>(GetParam()); }
  void run(Attention& a) const {
    DeviceCall gpu(a.in(), a.out(), a.options);
    gpu.options.family = family();
    gpu.run();
    gpu.download();
  }
};

TEST_P(GpuValues, equal_rows_of_large_values_give_v) {
  if (dtype() == DType::fp16) GTEST_SKIP() << "133120 is beyond fp16";
  Attention a({1, 130, 200, 2, 1, 64, 64}, dtype());
  for (Array* array : {&a.q, &a.k, &a.v}) array->fill(133120);
  run(a);
  a.o.for_each([&](const Dims& at) { ASSERT_EQ(a.o[at], (a.v[{0, 0, 0, 0}])); });
}

/// Logits of +-1e30 (fp16: 1e9): the largest takes all.
TEST_P(GpuValues, logits_far_apart) {
  const double size = dtype() == DType::fp16 ? 3e4 : 1e15;
  Attention a({1, 70, 150, 1, 1, 16, 16}, dtype());
  a.q.fill([&](const Dims& at) { return at[3] == 0 ? (at[1] % 2 ? size : -size) : 0; });
  a.k.fill([&](const Dims& at) { return at[3] == 0 ? (at[1] == 11 ? size : at[1] == 140 ? -size : 0) : 0; });
  a.options.scale = 1;
  run(a);
  // fp32 products are sums of tf32 ones, 22 bits of V.
  const double rounding = dtype() == DType::fp32 ? 0x1p-21 : 0;
  a.o.for_each([&](const Dims& at) {
    const double value = a.v[{0, at[1] % 2 ? 11 : 140, 0, at[3]}];
    ASSERT_NEAR(a.o[at], value, rounding * std::abs(value)) << at[1];
  });
}

TEST_P(GpuValues, nan_in_a_query_row_stays_there) {
  Attention a({2, 150, 100, 4, 2, 48, 32}, dtype());
  run(a);
  const Array clean = a.o, lse = a.lse;
  a.q.set({1, 70, 2, 5}, kNan);
  run(a);
  a.o.for_each([&](const Dims& at) {
    const bool hit = at[0] == 1 && at[1] == 70 && at[2] == 2;
    ASSERT_TRUE(hit ? std::isnan(a.o[at]) : a.o[at] == clean[at]) << at[0] << " " << at[1] << " " << at[2];
  });
  EXPECT_TRUE(std::isnan(a.lse[{1, 2, 70}]));
  EXPECT_EQ((a.lse[{1, 2, 71}]), (lse[{1, 2, 71}]));
}

TEST_P(GpuValues, nan_in_a_value_reaches_the_rows_that_see_it) {
  Attention a({1, 40, 90, 2, 2, 32, 32}, dtype());
  a.options.causal = Causal::bottom_right;
  run(a);
  const Array clean = a.o;
  a.v.set({0, 80, 1, 7}, kNan);  // seen by rows 30 and later of head 1
  run(a);
  for (std::int64_t i = 0; i < 40; ++i) {
    EXPECT_TRUE(i < 30 || std::isnan(a.o[{0, i, 1, 7}])) << i;
    EXPECT_EQ((a.o[{0, i, 0, 7}]), (clean[{0, i, 0, 7}])) << i;
  }
}

/// A key whose logit is -inf weighs 0, and a row of nothing else is empty.
TEST_P(GpuValues, bias_of_minus_infinity_masks) {
  if (family() == "sm90") GTEST_SKIP() << "has no bias";
  Attention a({1, 70, 130, 2, 1, 32, 32}, dtype());
  Array bias(DType::fp32, {70, 130});
  bias.fill([](const Dims& at) { return at[0] == 5 || at[1] % 3 == 0 ? -kInfinity : 0.25; });
  a.options.bias = bias;
  run(a);
  EXPECT_TRUE(forward_agrees(a.in(), a.out(), a.options));
  EXPECT_EQ((a.o[{0, 5, 1, 3}]), 0);
  EXPECT_EQ((a.lse[{0, 1, 5}]), -kInfinity);
}

TEST_P(GpuValues, sinks_alone_and_none) {
  Attention a({1, 30, 10, 2, 1, 32, 32}, dtype());
  const Array sinks(DType::fp32, {2}, {1.5, -kInfinity});
  a.options.sinks = sinks;
  a.options.causal = Causal::bottom_right;  // rows 0 to 19 see no key
  run(a);
  EXPECT_TRUE(forward_agrees(a.in(), a.out(), a.options));
  EXPECT_EQ((a.lse[{0, 0, 3}]), 1.5);
  EXPECT_EQ((a.lse[{0, 1, 3}]), -kInfinity);
  EXPECT_EQ((a.o[{0, 3, 0, 3}]), 0);
}

std::string values_name(const testing::TestParamInfo<std::tuple<DType, std::string>>& info) {
  return std::string(name(std::get<0>(info.param))) + "_" + std::get<1>(info.param);
}
INSTANTIATE_TEST_SUITE_P(sm80, GpuValues,
                         testing::Combine(testing::Values(DType::bf16, DType::fp16, DType::fp32),
                                          testing::Values("sm80")),
                         values_name);
INSTANTIATE_TEST_SUITE_P(sm90, GpuValues,
                         testing::Combine(testing::Values(DType::bf16, DType::fp16), testing::Values("sm90")),
                         values_name);

}  // namespace
}  // namespace narrows::test
