// Gradients on a GPU: broadcast biases, slopes and sinks of every type, strides, empty rows, NaN and far logits, zero sizes.
#include "cpu/reference.hpp"
#include "tests/gpu/device_call.hpp"
#include "tests/support/check.hpp"

#include <cmath>
#include <limits>

namespace narrows::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

class GpuBackwardValues : public OnGpu<testing::TestWithParam<std::tuple<DType, std::string>>> {
 protected:
  std::string_view family() const override { return std::get<1>(GetParam()); }
  static DType dtype() { return std::get<0>(GetParam()); }
  struct Rules {
    Array bias, slopes, sinks, dbias, dslopes, dsinks;
  };
  static void saved_by_oracle(Attention& a) { reference::forward(a.in(), a.out(), a.options); }
  static Gradients wanted(const Attention& a, const Rules& rules = {}) {
    return {a.dq, a.dk, a.dv, rules.dbias, rules.dslopes, rules.dsinks};
  }
  void run(const Attention& a, const Gradients& out) const {
    DeviceBackward gpu(a.backward_in(), out, a.options);
    gpu.options.family = family();
    gpu.run();
    gpu.download();
    EXPECT_TRUE(gpu.surroundings_intact());
    EXPECT_EQ(gpu.status().code, 0);
  }
  void expect_right(Attention& a, const Rules& rules = {}) const {
    saved_by_oracle(a);
    run(a, wanted(a, rules));
    EXPECT_TRUE(backward_agrees(a.backward_in(), wanted(a, rules), a.options));
  }
  static void expect_zeros(const Attention& a) {
    for (const Array* array : {&a.dq, &a.dk, &a.dv})
      for (const double value : array->values()) ASSERT_EQ(value, 0);
  }
};

TEST_P(GpuBackwardValues, biases_of_every_type_and_broadcast) {
  if (family() == "sm90") GTEST_SKIP() << "has no bias";
  for (const DType type : {DType::fp32, DType::bf16, DType::fp16})
    for (const Dims& shape : {Dims{2, 4, 70, 150}, Dims{1, 4, 70, 150}, Dims{2, 1, 70, 150}, Dims{1, 1, 1, 150},
                              Dims{2, 4, 70, 1}, Dims{70, 150}, Dims{150}, Dims{1, 1, 1, 1}}) {
      SCOPED_TRACE(text(name(type), " ", shape));
      Attention a({2, 70, 150, 4, 2, 32, 48}, dtype());
      a.options.causal = Causal::bottom_right;
      Rules rules;
      rules.bias = std::move(Array(type, shape).fill_gaussian(51));
      rules.dbias = Array(type, shape);
      a.options.bias = rules.bias;
      expect_right(a, rules);
    }
}

TEST_P(GpuBackwardValues, slopes_and_sinks_of_every_type) {
  for (const DType type : {DType::fp32, DType::bf16, DType::fp16})
    for (const Dims& shape : {Dims{4}, Dims{2, 4}}) {
      SCOPED_TRACE(text(name(type), " ", shape));
      Attention a({2, 70, 150, 4, 2, 32, 48}, dtype());
      Rules rules;
      rules.slopes = std::move(Array(type, shape).fill([](const Dims& at) {
        return 0.25 / static_cast<double>(1 + at[0] + 2 * at[at.rank() - 1]);
      }));
      rules.sinks = Array(type, {4}, {0.5, -kInfinity, 2, -1});
      rules.dslopes = Array(type, shape);
      rules.dsinks = Array(type, {4});
      a.options.alibi_slopes = rules.slopes;
      a.options.sinks = rules.sinks;
      a.options.causal = Causal::top_left;
      expect_right(a, rules);
      EXPECT_EQ(rules.dsinks[{1}], 0) << "the gradient of no sink";
    }
}

/// Slopes of sequences that end in the middle of blocks, one of them without a row.
TEST_P(GpuBackwardValues, slopes_of_packed_sequences) {
  const Array cu_q = int32_array({0, 60, 60, 131, 200}), cu_k = int32_array({0, 90, 150, 150, 400});
  Attention a = Attention::packed({1, 203, 405, 2, 1, 64, 64}, dtype());
  a.options.cu_seqlens_q = cu_q;
  a.options.cu_seqlens_k = cu_k;
  Rules rules;
  rules.slopes = std::move(Array(DType::fp32, {4, 2}).fill([](const Dims& at) {
    return 0.015625 * static_cast<double>(1 + at[0] + at[1]);
  }));
  rules.dslopes = Array(DType::fp32, {4, 2});
  a.options.alibi_slopes = rules.slopes;
  expect_right(a, rules);
  for (const std::int64_t h : {0, 1}) EXPECT_EQ((rules.dslopes[{1, h}]), 0);
}

TEST_P(GpuBackwardValues, head_dims_that_differ_and_wide_ones) {
  for (const auto& [d, dv] :
       {std::pair{128, 40}, std::pair{24, 120}, std::pair{17, 96}, std::pair{192, 128}, std::pair{256, 256},
        std::pair{300, 64}, std::pair{64, 400}, std::pair{576, 512}, std::pair{576, 128}, std::pair{512, 192}}) {
    if (family() == "sm90" && (std::max(d, dv) > 256 || d % 8 != 0)) continue;
    SCOPED_TRACE(text(d, " ", dv));
    Attention a({1, 70, 90, 2, 1, d, dv}, dtype());
    a.options.causal = Causal::bottom_right;
    expect_right(a);
  }
}

TEST_P(GpuBackwardValues, any_strides_and_a_dout_that_is_expanded) {
  if (family() == "sm90") GTEST_SKIP() << "the copy engine reads rows of adjoining columns";
  for (const Arrangement& arrangement :
       {Arrangement{{0, 2, 1, 3}, 0}, Arrangement{{3, 1, 0, 2}, 3}, Arrangement{{2, 0, 3, 1}, 1}}) {
    Attention a({2, 50, 70, 4, 2, 24, 40}, dtype());
    std::uint64_t seed = 5;
    for (Array* array : {&a.q, &a.k, &a.v, &a.dout})
      *array = std::move(Array(a.q.dtype(), array->shape(), arrangement).fill_gaussian(++seed));
    for (Array* array : {&a.dq, &a.dk, &a.dv}) *array = Array(a.q.dtype(), array->shape(), arrangement);
    expect_right(a);
    for (const Array* array : {&a.dq, &a.dk, &a.dv}) EXPECT_TRUE(array->gaps_intact());
  }
  Attention a({2, 50, 70, 4, 2, 32, 64}, dtype());
  saved_by_oracle(a);
  BackwardInputs in = a.backward_in();
  for (std::size_t axis = 0; axis < 4; ++axis) in.dout.strides[axis] = 0;
  DeviceBackward gpu(in, a.gradients(), a.options);
  gpu.options.family = family();
  gpu.run();
  gpu.download();
  EXPECT_TRUE(backward_agrees(in, a.gradients(), a.options));
}

/// What the copy engine reads, and results of any strides.
TEST_P(GpuBackwardValues, rows_with_gaps_and_results_anywhere) {
  Attention a({2, 150, 170, 4, 2, 40, 64}, dtype());
  std::uint64_t seed = 5;
  for (Array* array : {&a.q, &a.k, &a.v, &a.dout})
    *array = std::move(Array(a.q.dtype(), array->shape(), {{0, 2, 1, 3}, 24}).fill_gaussian(++seed));
  for (Array* array : {&a.dq, &a.dk, &a.dv}) *array = Array(a.q.dtype(), array->shape(), {{3, 1, 0, 2}, 3});
  expect_right(a);
  for (const Array* array : {&a.dq, &a.dk, &a.dv}) EXPECT_TRUE(array->gaps_intact());
}

TEST_P(GpuBackwardValues, a_gradient_of_the_lse_alone) {
  Attention a({1, 40, 60, 2, 1, 32, 32}, dtype());
  a.dlse = std::move(Array(DType::fp32, a.lse.shape()).fill_gaussian(61));
  expect_right(a);
  a.dout.fill(0);
  expect_right(a);
}

TEST_P(GpuBackwardValues, rows_without_keys_have_no_gradient_and_may_be_nan) {
  Attention a({1, 80, 30, 2, 1, 32, 32}, dtype());
  a.options.causal = Causal::bottom_right;  // rows 0 to 49 see no key
  saved_by_oracle(a);
  for (std::int64_t i = 0; i < 50; ++i)
    for (std::int64_t x = 0; x < 32; ++x)
      for (Array* array : {&a.q, &a.o, &a.dout}) array->set({0, i, 1, x}, kNan);
  run(a, a.gradients());
  for (const Array* array : {&a.dq, &a.dk, &a.dv})
    for (const double value : array->values()) ASSERT_TRUE(std::isfinite(value));
  for (std::int64_t i = 0; i < 50; ++i) ASSERT_EQ((a.dq[{0, i, 1, 3}]), 0);
}

TEST_P(GpuBackwardValues, unused_keys_of_nan_reach_nothing) {
  Attention a({1, 70, 130, 2, 1, 32, 32}, dtype());
  const Array used = int32_array({100});
  a.options.seqused_k = used;
  for (const std::int64_t j : {100, 129})
    for (std::int64_t x = 0; x < 32; ++x)
      for (Array* array : {&a.k, &a.v}) array->set({0, j, 0, x}, kNan);
  expect_right(a);
  for (const std::int64_t j : {100, 129}) {
    EXPECT_EQ((a.dk[{0, j, 0, 3}]), 0) << j;
    EXPECT_EQ((a.dv[{0, j, 0, 3}]), 0) << j;
  }
}

TEST_P(GpuBackwardValues, nan_in_a_query_row_stays_in_its_row_of_dq) {
  Attention a({1, 150, 100, 2, 1, 48, 32}, dtype());
  saved_by_oracle(a);
  a.q.set({0, 70, 1, 5}, kNan);
  run(a, a.gradients());
  for (std::int64_t i = 0; i < 150; ++i)
    for (std::int64_t h = 0; h < 2; ++h) EXPECT_EQ(std::isnan(a.dq[{0, i, h, 0}]), i == 70 && h == 1) << i << " " << h;
  EXPECT_TRUE(std::isnan(a.dk[{0, 5, 0, 5}]));
}

TEST_P(GpuBackwardValues, large_logits) {
  for (const double size : {30.0, 2000.0}) {
    if (dtype() == DType::fp16 && size > 30) continue;
    SCOPED_TRACE(size);
    Attention a({1, 40, 70, 2, 2, 32, 32}, dtype());
    a.q.fill_gaussian(3, size);
    expect_right(a);
  }
}

/// Beyond |LSE| = 2^23 another expression makes P. Each row has one key, whose logit 2^26 is exact in every type.
TEST_P(GpuBackwardValues, logits_that_are_far_out) {
  Attention a({1, 70, 32, 2, 1, 32, 32}, dtype());
  a.options.scale = 1;
  a.q.fill([](const Dims& at) { return at[1] % 32 == at[3] ? 4096.0 : 0.0; });
  a.k.fill([](const Dims& at) { return at[1] == at[3] ? 16384.0 : 0.0; });
  expect_right(a);
  const double sum = a.dout[{0, 5, 0, 7}] + a.dout[{0, 37, 0, 7}] + a.dout[{0, 69, 0, 7}] + a.dout[{0, 5, 1, 7}] +
                     a.dout[{0, 37, 1, 7}] + a.dout[{0, 69, 1, 7}];
  EXPECT_NEAR((a.dv[{0, 5, 0, 7}]), sum, 0.05);  // P is 1
}

TEST_P(GpuBackwardValues, every_sign_of_the_scale) {
  for (const double scale : {0.0, -0.125, 2.0}) {
    SCOPED_TRACE(scale);
    Attention a({1, 40, 140, 2, 1, 32, 32}, dtype());
    a.options.scale = scale;
    expect_right(a);
  }
}

/// dS is rounded to the dtype for its products, as in standard attention: fp16 holds no 120000.
TEST_P(GpuBackwardValues, a_gradient_of_scores_beyond_fp16_is_not_finite_there) {
  Attention a({1, 1, 2, 1, 1, 8, 8}, dtype());
  a.options.scale = 1.0;
  a.q.fill(0);
  a.dout.fill(30000);
  a.k.fill([](const Dims& at) { return at[1] == 0 ? 0.001 : -0.001; });
  a.v.fill([](const Dims& at) { return at[1] == 0 ? 1.0 : -1.0; });
  saved_by_oracle(a);
  run(a, a.gradients());
  const double dq = a.dq[{0, 0, 0, 3}];  // 0.5 * 240000 * 0.001, twice
  if (dtype() == DType::fp16)
    EXPECT_FALSE(std::isfinite(dq)) << dq;
  else
    EXPECT_NEAR(dq, 240, 2);
  EXPECT_EQ((a.dv[{0, 1, 0, 5}]), dtype() == DType::bf16 ? 14976 : 15000);
}

TEST_P(GpuBackwardValues, zero_sizes) {
  if (family() == "sm90") GTEST_SKIP() << "the copy engine knows no empty tensor";
  for (const Sizes& s :
       {Sizes{0, 3, 4, 2, 1}, Sizes{2, 0, 4, 2, 1}, Sizes{2, 3, 0, 2, 1}, Sizes{2, 3, 4, 0, 0}, Sizes{2, 3, 4, 0, 2}}) {
    SCOPED_TRACE(text(s.b, " ", s.sq, " ", s.sk, " ", s.h));
    Attention a(s, dtype());
    Rules rules;
    rules.bias = Array(DType::fp32, {1, s.h, s.sq, s.sk});
    rules.slopes = Array(DType::fp32, {s.h});
    rules.sinks = Array(DType::fp32, {s.h});
    for (Array* array : {&rules.bias, &rules.slopes, &rules.sinks}) array->fill(0.5);
    rules.dbias = Array(DType::fp32, rules.bias.shape());
    rules.dslopes = Array(DType::fp32, {s.h});
    rules.dsinks = Array(DType::fp32, {s.h});
    a.options.bias = rules.bias;
    a.options.alibi_slopes = rules.slopes;
    a.options.sinks = rules.sinks;
    expect_right(a, rules);
    ASSERT_NO_FATAL_FAILURE(expect_zeros(a));
    for (const double value : rules.dslopes.values()) EXPECT_EQ(value, 0);
  }
}

std::string backward_values_name(const testing::TestParamInfo<std::tuple<DType, std::string>>& info) {
  return std::string(name(std::get<0>(info.param))) + "_" + std::get<1>(info.param);
}
INSTANTIATE_TEST_SUITE_P(sm80, GpuBackwardValues,
                         testing::Combine(testing::Values(DType::bf16, DType::fp16, DType::fp32),
                                          testing::Values("sm80")),
                         backward_values_name);
INSTANTIATE_TEST_SUITE_P(sm90, GpuBackwardValues,
                         testing::Combine(testing::Values(DType::bf16, DType::fp16), testing::Values("sm90")),
                         backward_values_name);

}  // namespace
}  // namespace narrows::test
