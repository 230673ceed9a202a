// Failures of other libraries that no other suite reaches, through the public calls. Each test carries its row's number.
#include <gtest/gtest.h>

#include "core/error.hpp"
#include "tests/support/attention.hpp"
#include "tests/support/check.hpp"

#include <cmath>
#include <cstdlib>

namespace narrows::test {
namespace {

std::int64_t cut(std::int64_t many, std::int64_t few) { return std::getenv("NARROWS_TEST_SMALL") ? few : many; }

void call_forward(Attention& call) {
  call.o.poison();
  call.lse.poison();
  forward(call.in(), call.out(), call.options);
}

void call_backward(Attention& call) {
  call_forward(call);
  for (Array* gradient : {&call.dq, &call.dk, &call.dv}) gradient->poison();
  backward(call.backward_in(), call.gradients(), call.options);
}

TEST(Reported, A12_lse_of_a_masked_row_is_minus_infinity) {
  Attention call({.b = 1, .sq = 3, .sk = 5, .h = 2, .hk = 1});
  const Array mask(DType::boolean, {3, 1}, std::vector<double>{1, 0, 1});
  call.options.mask = mask;
  call_forward(call);
  for (std::int64_t h = 0; h < 2; ++h) {
    EXPECT_EQ(call.lse.at({0, h, 1}), -kInfinite);
    EXPECT_TRUE(std::isfinite(call.lse.at({0, h, 0})));
    for (std::int64_t c = 0; c < 8; ++c) EXPECT_EQ(call.o.at({0, 1, h, c}), 0);
  }
}

TEST(Reported, A06_K03_rows_without_keys_are_written_and_gradients_repeat_with_any_scratch) {
  Attention call({.b = 2, .sq = 33, .sk = 7, .h = 4, .hk = 2});
  call.options.causal = Causal::bottom_right;
  call.options.deterministic = true;
  std::vector<std::uint8_t> scratch(static_cast<std::size_t>(backward_workspace_size(call.in(), call.options)));
  call_backward(call);
  const Array dq = call.dq, dk = call.dk, dv = call.dv;
  EXPECT_EQ(call.o.at({1, 25, 3, 0}), 0);
  EXPECT_NE(call.o.at({1, 26, 3, 0}), 0);
  for (const std::uint8_t poison : std::initializer_list<std::uint8_t>{0xFF, 0x00, 0x7F}) {
    std::fill(scratch.begin(), scratch.end(), poison);
    for (Array* gradient : {&call.dq, &call.dk, &call.dv}) gradient->poison();
    Options options = call.options;
    options.workspace = view(scratch.data(), {static_cast<std::int64_t>(scratch.size())});
    backward(call.backward_in(), call.gradients(), options);
    EXPECT_TRUE(call.dq.same_bits(dq) && call.dk.same_bits(dk) && call.dv.same_bits(dv));
  }
}

TEST(Reported, C09_gradients_past_the_last_sequence_are_0) {
  Attention call = Attention::packed({.b = 0, .sq = 9, .sk = 12, .h = 2, .hk = 1});
  const Array q = int32_array({0, 2, 6}), k = int32_array({0, 5, 8});
  call.options.cu_seqlens_q = q;
  call.options.cu_seqlens_k = k;
  call_backward(call);
  for (std::int64_t c = 0; c < 8; ++c) {
    EXPECT_EQ(call.dq.at({8, 1, c}), 0);
    EXPECT_EQ(call.dk.at({8, 0, c}), 0);
    EXPECT_EQ(call.dv.at({11, 0, c}), 0);
  }
  EXPECT_NE(call.dk.at({7, 0, 0}), 0);
}

/// Many small sequences equal each sequence alone, bit for bit where the layouts agree.
TEST(Reported, D01_D02_D09_D11_more_than_65535_sequences_times_heads) {
  const std::int64_t batch = cut(70000, 9000);
  Attention call({.b = batch, .sq = 1, .sk = 2, .h = 1, .hk = 1, .d = 4, .dv = 4});
  call_backward(call);
  for (const std::int64_t b : {std::int64_t{0}, batch / 2 + 1, batch - 1}) {
    double score[2], sum = 0, expected = 0;
    for (std::int64_t j = 0; j < 2; ++j) {
      score[j] = 0;
      for (std::int64_t c = 0; c < 4; ++c) score[j] += call.q.at({b, 0, 0, c}) * call.k.at({b, j, 0, c}) / 2;
      sum += std::exp(score[j]);
    }
    for (std::int64_t j = 0; j < 2; ++j) expected += std::exp(score[j]) / sum * call.v.at({b, j, 0, 3});
    EXPECT_NEAR(call.o.at({b, 0, 0, 3}), expected, 1e-5);
    EXPECT_NEAR(call.dv.at({b, 1, 0, 3}), std::exp(score[1]) / sum * call.dout.at({b, 0, 0, 3}), 1e-5);
  }
}

TEST(Reported, D12_many_packed_sequences_equal_a_dense_batch) {
  const std::int64_t batch = cut(20000, 2000);
  const Sizes sizes{.b = batch, .sq = 4, .sk = 4, .h = 1, .hk = 1, .d = 8, .dv = 8};
  Attention dense(sizes);
  dense.options.causal = Causal::bottom_right;
  call_forward(dense);
  Attention packed = Attention::packed({.b = 0, .sq = 4 * batch, .sk = 4 * batch, .h = 1, .hk = 1, .d = 8, .dv = 8});
  Array bounds(DType::int32, {batch + 1});
  bounds.fill([](const Dims& at) { return static_cast<double>(4 * at[0]); });
  packed.options.causal = Causal::bottom_right;
  packed.options.cu_seqlens_q = packed.options.cu_seqlens_k = bounds;
  call_forward(packed);
  EXPECT_EQ(packed.o.values(), dense.o.values());
}

TEST(Reported, D06_D07_a_bias_over_65537_keys) {
  for (const std::int64_t keys : {cut(65536, 1024), cut(65537, 1025)}) {
    Attention call({.b = 1, .sq = 3, .sk = keys, .h = 1, .hk = 1}, DType::bf16);
    Array bias(DType::bf16, {3, keys});
    bias.fill_gaussian(5);
    call.options.bias = bias;
    call_backward(call);
    EXPECT_TRUE(forward_agrees(call.in(), call.out(), call.options));
    EXPECT_TRUE(backward_agrees(call.backward_in(), call.gradients(), call.options));
  }
}

TEST(Reported, F11_J06_every_head_writes_its_lse_in_one_layout) {
  Attention call = Attention::packed({.b = 0, .sq = 2, .sk = 350, .h = 8, .hk = 2, .d = 16, .dv = 16}, DType::bf16);
  const Array q = int32_array({0, 1, 2}), k = int32_array({0, 300, 350});
  call.options.cu_seqlens_q = q;
  call.options.cu_seqlens_k = k;
  call_forward(call);
  for (const double lse : call.lse.values()) EXPECT_TRUE(std::isfinite(lse));
  Array other(DType::fp32, {2, 8});
  EXPECT_THROW(forward(call.in(), {call.o, other}, call.options), Error);
}

TEST(Reported, F13_K01_gradients_repeat_bit_for_bit) {
  Attention call({.b = 1, .sq = 300, .sk = 128, .h = 2, .hk = 1, .d = 32, .dv = 32}, DType::fp16);
  for (Array* input : {&call.q, &call.k, &call.v})
    input->fill([&, &array = *input](const Dims& at) { return 3 * array.at(at); });
  call_backward(call);
  const Array dq = call.dq, dk = call.dk, dv = call.dv;
  for (int repeat = 0; repeat < 20; ++repeat) {
    call_backward(call);
    ASSERT_TRUE(call.dq.same_bits(dq) && call.dk.same_bits(dk) && call.dv.same_bits(dv)) << repeat;
  }
}

TEST(Reported, F15_splits_of_many_rows_join_each_row_alone) {
  Attention call({.b = 5, .sq = 1, .sk = 2100, .h = 16, .hk = 4, .d = 16, .dv = 16});
  for (const int splits : {1, 2, 4}) {
    call.options.num_splits = splits;
    call_forward(call);
    EXPECT_TRUE(forward_agrees(call.in(), call.out(), call.options)) << splits;
  }
}

TEST(Reported, G08_a_call_remembers_nothing_of_the_one_before) {
  const Sizes sizes{.b = 2, .sq = 9, .sk = 30, .h = 2, .hk = 1};
  Attention first(sizes);
  call_forward(first);
  // K and V as views into one interleaved buffer (b, sk, 2, d), then another dtype of the same shapes.
  Array both(DType::fp32, {2, 30, 2, 8});
  both.fill([&](const Dims& at) { return (at[2] == 0 ? first.k : first.v).at({at[0], at[1], 0, at[3]}); });
  Tensor k = both.tensor(), v = both.tensor();
  k.shape = v.shape = {2, 30, 1, 8};
  v.data = static_cast<float*>(v.data) + 8;
  Attention second = first;
  second.o.poison();
  forward({second.q, k, v}, second.out(), {});
  EXPECT_EQ(second.o.values(), first.o.values());
  Attention third(sizes, DType::bf16);
  call_forward(third);
  EXPECT_TRUE(forward_agrees(third.in(), third.out(), third.options));
}

TEST(Reported, G11_biases_of_any_width_and_alignment) {
  for (const std::int64_t keys : {43, 77}) {
    Attention call({.b = 1, .sq = 5, .sk = keys, .h = 2, .hk = 2}, DType::fp16);
    Array bias(DType::fp16, {2, 5, keys});
    bias.fill_gaussian(9);
    call.options.bias = bias;
    call_forward(call);
    EXPECT_TRUE(forward_agrees(call.in(), call.out(), call.options));
  }
}

TEST(Reported, I17_each_call_stands_alone) {
  Attention call({.b = 1, .sq = 12, .sk = 12, .h = 1, .hk = 1});
  call.options.causal = Causal::bottom_right;
  call_forward(call);
  const Array causal = call.o;
  Array mask(DType::boolean, {12, 12});
  mask.fill(0);
  Options masked = call.options;
  masked.mask = mask;
  forward(call.in(), call.out(), masked);
  EXPECT_EQ(call.o.at({0, 11, 0, 0}), 0);
  call_forward(call);
  EXPECT_TRUE(call.o.same_bits(causal));
}

TEST(Reported, I20_a_mask_of_other_sizes_is_refused) {
  Attention call({.b = 1, .sq = 7, .sk = 7, .h = 1, .hk = 1});
  Array mask(DType::boolean, {9, 9});
  mask.fill(1);
  call.options.mask = mask;
  EXPECT_THROW(call_forward(call), Error);
}

TEST(Reported, J02_the_lse_is_natural) {
  Attention call({.b = 1, .sq = 1, .sk = 1, .h = 1, .hk = 1, .d = 1, .dv = 1});
  call.q.fill(3);
  call.k.fill(2);
  call_forward(call);
  EXPECT_FLOAT_EQ(static_cast<float>(call.lse.at({0, 0, 0})), 6);
  Attention two({.b = 1, .sq = 1, .sk = 2, .h = 1, .hk = 1});
  two.options.scale = 0;  // equal weights: ln 2
  call_forward(two);
  EXPECT_FLOAT_EQ(static_cast<float>(two.lse.at({0, 0, 0})), std::log(2.0F));
}

TEST(Reported, F15_a_value_of_nan_reaches_every_row_that_sees_it_whatever_the_splits) {
  Attention call({.b = 1, .sq = 1, .sk = 2100, .h = 1, .hk = 1});
  call.k.fill([](const Dims& at) { return at[1] == 2000 ? 1000.0 : 0.0; });
  call.q.fill(1);
  call.v.set({0, 3, 0, 2}, std::nan(""));
  for (const int splits : {1, 2, 4}) {
    call.options.num_splits = splits;
    call_forward(call);
    EXPECT_TRUE(std::isnan(call.o.at({0, 0, 0, 2}))) << splits;
    EXPECT_EQ(call.o.at({0, 0, 0, 1}), call.v.at({0, 2000, 0, 1})) << splits;
  }
}

TEST(Reported, K05_gradients_do_not_follow_num_splits_under_batch_invariant) {
  Attention call({.b = 1, .sq = 40, .sk = 1500, .h = 2, .hk = 1, .d = 16, .dv = 16});
  call.options.batch_invariant = true;
  call_backward(call);
  const Array dq = call.dq;
  call.options.num_splits = 1;
  call_backward(call);
  EXPECT_TRUE(call.dq.same_bits(dq));
}

TEST(Reported, C14_an_empty_batch_or_no_rows_ask_for_no_scratch_and_no_time) {
  const Tensor q{.shape = {0, 8192, 8, 128}}, k{.shape = {0, 1 << 20, 8, 128}};
  EXPECT_LT(workspace_size({q, k, k}), 1 << 22);
  EXPECT_LT(backward_workspace_size({q, k, k}), 1 << 22);
  const Tensor none{.shape = {std::int64_t{1} << 40, 0, 2, 8}}, lse{.shape = {std::int64_t{1} << 40, 2, 0}};
  EXPECT_NO_THROW(backward({.q = none, .k = none, .v = none, .o = none, .lse = lse, .dout = none},
                           {.dq = none, .dk = none, .dv = none}));
}

TEST(Reported, M04_fp8_is_refused_by_name) {
  Attention call({.b = 1, .sq = 1, .sk = 1, .h = 1, .hk = 1});
  Inputs in = call.in();
  in.q.dtype = DType::uint8;
  try {
    forward(in, call.out(), {});
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "q: uint8: must be fp16, bf16, fp32 or fp64 (fp8 comes later)");
  }
}

}  // namespace
}  // namespace narrows::test
