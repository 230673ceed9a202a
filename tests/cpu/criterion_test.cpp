#include "cpu/criterion.hpp"

#include <gtest/gtest.h>

#include "tests/support/attention.hpp"
#include "tests/support/check.hpp"

namespace narrows::test {
namespace {

/// Two rows of two elements with E = |exact| and no logits.
reference::Result result(const std::vector<double>& values) {
  reference::Result made{{2, 2}, values, values, std::vector<double>(4, 0)};
  for (double& magnitude : made.magnitude) magnitude = std::abs(magnitude);
  return made;
}

Verdict judge_values(const std::vector<double>& ours, const std::vector<double>& exact,
                     const std::vector<double>& plain, DType compute = DType::bf16, const std::string& name = "o") {
  const Array array(DType::fp64, {2, 2}, ours);
  return judge(name, array, result(exact), result(plain), compute);
}

TEST(Criterion, twice_the_plain_error_of_the_row_and_u_E) {
  const std::vector<double> exact{1, 2, 3, 4}, plain{1, 2.5, 3, 4};
  const double u = 0x1p-8;
  EXPECT_TRUE(judge_values({2 + u, 2, 3, 4}, exact, plain).passed);
  EXPECT_FALSE(judge_values({2.001 + u, 2, 3, 4}, exact, plain).passed);
  EXPECT_TRUE(judge_values({1, 2, 3, 4 + 4 * u}, exact, plain).passed);
  const Verdict verdict =
      judge_values({1, 2, 3, 5}, exact, plain);  // the other row's plain error helps this one nothing
  EXPECT_FALSE(verdict.passed);
  EXPECT_EQ(verdict.where, (Dims{1, 1}));
  EXPECT_EQ(verdict.ours, 5);
  EXPECT_EQ(verdict.exact, 4);
  EXPECT_EQ(verdict.limit, 4 * u);
  EXPECT_DOUBLE_EQ(verdict.worst, 64);
  EXPECT_DOUBLE_EQ(verdict.error, std::sqrt(1.0 / 30));
  EXPECT_DOUBLE_EQ(verdict.plain_error, std::sqrt(0.25 / 30));
}

TEST(Criterion, u_of_each_type) {
  const std::vector<double> exact{1, 1, 1, 1};
  for (const auto& [dtype, u] : {std::pair{DType::bf16, 0x1p-8}, {DType::fp16, 0x1p-11}, {DType::fp32, 0x1p-21}}) {
    EXPECT_TRUE(judge_values({1 + u, 1, 1, 1}, exact, exact, dtype).passed);
    EXPECT_FALSE(judge_values({1 + 1.01 * u, 1, 1, 1}, exact, exact, dtype).passed);
  }
}

TEST(Criterion, an_infinite_plain_result_allows_nothing) {
  EXPECT_FALSE(judge_values({2, 1, 1, 1}, {1, 1, 1, 1}, {kInfinite, kNaN, 1, 1}).passed);
}

TEST(Criterion, NaN_and_infinity) {
  const std::vector<double> ones{1, 1, 1, 1};
  const Verdict verdict = judge_values({1, 1, kNaN, 1}, ones, ones);
  EXPECT_FALSE(verdict.passed);
  EXPECT_EQ(verdict.where, (Dims{1, 0}));
  EXPECT_FALSE(judge_values({kNaN, 1, 1, 1}, ones, ones).passed);
  EXPECT_FALSE(judge_values({kInfinite, 1, 1, 1}, ones, ones).passed);
  EXPECT_FALSE(judge_values(ones, {1, kNaN, 1, 1}, ones).passed);
  EXPECT_TRUE(judge_values({1, kNaN, 1, 1}, {1, kNaN, 1, 1}, ones).passed);
  const std::vector<double> empty{-kInfinite, 1, 1, 1};
  EXPECT_TRUE(judge_values(empty, empty, empty, DType::fp32, "lse").passed);
  EXPECT_FALSE(judge_values(ones, empty, empty, DType::fp32, "lse").passed);
  EXPECT_FALSE(judge_values({kInfinite, 1, 1, 1}, empty, empty, DType::fp32, "lse").passed);
  EXPECT_FALSE(judge_values(empty, ones, ones, DType::fp32, "lse").passed);
}

TEST(Criterion, zero_must_be_zero) {
  const std::vector<double> zero(4, 0);
  EXPECT_TRUE(judge_values(zero, zero, zero).passed);
  EXPECT_FALSE(judge_values({0, 1e-30, 0, 0}, zero, zero).passed);
}

TEST(Criterion, lse_and_sums_have_no_plain_term) {
  const std::vector<double> exact{1, 1, 1, 1}, plain{9, 9, 9, 9};
  EXPECT_TRUE(judge_values({1 + 1.9e-5, 1, 1, 1}, exact, plain, DType::bf16, "lse").passed);
  EXPECT_FALSE(judge_values({1 + 2.1e-5, 1, 1, 1}, exact, plain, DType::bf16, "lse").passed);
  for (const char* name : {"dslopes", "dsinks"}) {
    EXPECT_TRUE(judge_values({1 + 0x1p-8, 1, 1, 1}, exact, plain, DType::bf16, name).passed);
    EXPECT_FALSE(judge_values({1.01, 1, 1, 1}, exact, plain, DType::bf16, name).passed);
  }
}

TEST(Criterion, text_names_the_element) {
  const Verdict verdict = judge_values({1, 2, 3, 5}, {1, 2, 3, 4}, {1, 2, 3, 4});
  EXPECT_EQ(verdict.text(),
            "o fails: worst o[1, 1] = 5, exact 4, limit 0.015625 (64 of it); relative error 0.182574186, plain 0");
}

class CriterionTypes : public testing::TestWithParam<DType> {};

void store(const std::vector<double>& values, Array& array) {
  std::size_t next = 0;
  array.fill([&](const Dims&) { return values[next++]; });
}

TEST_P(CriterionTypes, plain_and_rounded_exact_pass_and_a_shifted_mask_fails) {
  Attention a({2, 33, 40, 4, 2, 16, 24}, GetParam());
  a.options.causal = Causal::bottom_right;
  const reference::ForwardResult plain = reference::plain_forward(a.in(), a.options);
  store(plain.o.value, a.o);
  store(plain.lse.value, a.lse);
  if (GetParam() == DType::fp32 || GetParam() == DType::fp64) {
    EXPECT_TRUE(forward_agrees(a.in(), a.out(), a.options));
  } else {  // a rounded S shows in the LSE
    const std::vector<Verdict> verdicts = check_forward(a.in(), a.out(), a.options);
    EXPECT_TRUE(verdicts[0].passed) << verdicts[0].text();
    EXPECT_FALSE(verdicts[1].passed) << verdicts[1].text();
  }
  reference::forward(a.in(), a.out(), a.options);
  EXPECT_TRUE(forward_agrees(a.in(), a.out(), a.options));
  reference::backward(a.backward_in(), a.gradients(), a.options);
  EXPECT_TRUE(backward_agrees(a.backward_in(), a.gradients(), a.options));

  Attention wrong = a;
  const Array shift = int32_array({8, 7});  // sk - sq is 7 in both
  wrong.options.shift = shift;
  reference::forward(wrong.in(), wrong.out(), wrong.options);
  EXPECT_FALSE(forward_agrees(a.in(), wrong.out(), a.options));
  reference::backward(wrong.backward_in(), wrong.gradients(), wrong.options);
  for (const Verdict& verdict : check_backward(a.backward_in(), wrong.gradients(), a.options))
    EXPECT_FALSE(verdict.passed) << verdict.text();
}

TEST_P(CriterionTypes, sums_over_a_whole_call) {
  Attention a({2, 17, 19, 2, 1, 8, 8}, GetParam());
  const Array bias = Array(DType::fp32, {1, 2, 1, 19}).fill_gaussian(3), slopes(DType::fp32, {2}, {0.5, 0.25}),
              sinks(DType::fp32, {2}, {0.1, 1});
  Array dbias(DType::fp32, bias.shape()), dslopes(DType::fp32, {2}), dsinks(DType::fp32, {2});
  a.options.bias = bias;
  a.options.alibi_slopes = slopes;
  a.options.sinks = sinks;
  Gradients gradients = a.gradients();
  gradients.dbias = dbias;
  gradients.dslopes = dslopes;
  gradients.dsinks = dsinks;
  BackwardInputs in = a.backward_in();
  in.o = in.lse = Tensor{};
  reference::backward(in, gradients, a.options);
  EXPECT_TRUE(backward_agrees(in, gradients, a.options));
  EXPECT_EQ(check_backward(in, gradients, a.options).size(), 6);
  dsinks.set({1}, dsinks[{1}] * 3);
  dslopes.set({0}, dslopes[{0}] * 3);
  dbias.set({0, 1, 0, 18}, dbias[{0, 1, 0, 18}] + 1);
  for (const Verdict& verdict : check_backward(in, gradients, a.options))
    EXPECT_EQ(verdict.passed, verdict.name.size() == 2) << verdict.text();
}

std::string type_name(const testing::TestParamInfo<DType>& test) {
  return std::vector<std::string>{"fp16", "bf16", "fp32", "fp64"}[test.index];
}
INSTANTIATE_TEST_SUITE_P(Each, CriterionTypes, testing::Values(DType::fp16, DType::bf16, DType::fp32, DType::fp64),
                         type_name);

}  // namespace
}  // namespace narrows::test
