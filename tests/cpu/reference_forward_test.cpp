// The oracle's forward where the answer is known by hand.
#include <gtest/gtest.h>

#include "cpu/reference.hpp"
#include "tests/support/attention.hpp"

namespace narrows::test {
namespace {

void run_oracle(Attention& a) { reference::forward(a.in(), a.out(), a.options); }

/// The keys that a query sees: with q = 0 and v = one-hot(j) O is 1 / count there and exp(LSE) is the count.
std::vector<std::int64_t> visible(Attention& a, std::int64_t query) {
  a.q.fill(0);
  a.v.fill_one_hot();
  run_oracle(a);
  std::vector<std::int64_t> keys;
  for (std::int64_t j = 0; j < a.v.shape()[1]; ++j)
    if (a.o[{0, query, 0, j}] > 0) keys.push_back(j);
  EXPECT_NEAR(std::exp(a.lse[{0, 0, query}]), static_cast<double>(keys.size()), 1e-9);
  return keys;
}

using Keys = std::vector<std::int64_t>;

Attention counting(std::int64_t sq, std::int64_t sk) { return Attention({1, sq, sk, 1, 1, 4, sk}, DType::fp64); }

TEST(ReferenceForward, one_key_gives_its_value_and_its_logit) {
  Attention a({1, 1, 1, 2, 1, 3, 2}, DType::fp64);
  run_oracle(a);
  for (std::int64_t h = 0; h < 2; ++h) {
    double logit = 0;
    for (std::int64_t c = 0; c < 3; ++c) logit += a.q[{0, 0, h, c}] * a.k[{0, 0, 0, c}] / std::sqrt(3.0);
    EXPECT_NEAR((a.lse[{0, h, 0}]), logit, 1e-14);
    EXPECT_EQ((a.o[{0, 0, h, 1}]), (a.v[{0, 0, 0, 1}]));
  }
}

TEST(ReferenceForward, A01_empty_rows_are_zero_and_minus_infinity) {
  Attention a({1, 5, 2, 1, 1, 4, 2}, DType::bf16);
  a.options.causal = Causal::bottom_right;
  run_oracle(a);
  for (std::int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ((a.o[{0, i, 0, 0}]), 0);
    EXPECT_EQ((a.lse[{0, 0, i}]), -kInfinite);
  }
  EXPECT_EQ((a.o[{0, 3, 0, 1}]), (a.v[{0, 0, 0, 1}]));
}

TEST(ReferenceForward, A11_lowest_finite_bias_is_no_mask) {
  Attention a({1, 1, 3, 1, 1, 4, 2}, DType::fp64), free = a;
  Array bias(DType::fp32, {3});
  bias.fill(std::numeric_limits<float>::lowest());
  a.options.bias = bias;
  a.q.fill(0);
  free.q.fill(0);
  run_oracle(a);
  run_oracle(free);
  EXPECT_EQ(a.o.values(), free.o.values());
}

TEST(ReferenceForward, A16_sinks) {
  Attention none({1, 2, 0, 1, 1, 4, 2}, DType::fp32);
  Array sinks(DType::fp32, {1}, {0.5});
  none.options.sinks = sinks;
  run_oracle(none);
  EXPECT_EQ(none.o.values(), std::vector<double>(4, 0));
  EXPECT_EQ(none.lse.values(), std::vector<double>(2, 0.5));

  Attention large({1, 1, 4, 1, 1, 4, 2}, DType::fp64);
  sinks.fill(100);
  large.options.sinks = sinks;
  run_oracle(large);
  EXPECT_NEAR((large.lse[{0, 0, 0}]), 100, 1e-12);
  sinks.fill(-kInfinite);
  Attention without = large;
  without.options.sinks = {};
  run_oracle(large);
  run_oracle(without);
  EXPECT_TRUE(large.o.same_bits(without.o));
  EXPECT_TRUE(large.lse.same_bits(without.lse));
}

TEST(ReferenceForward, B01_large_negative_logits) {
  Attention a({1, 1, 2, 1, 1, 128, 1}, DType::bf16);
  a.q.fill(64);
  a.k.fill(-64);
  a.v.fill(1);
  run_oracle(a);
  EXPECT_EQ((a.o[{0, 0, 0, 0}]), 1);
  EXPECT_NEAR((a.lse[{0, 0, 0}]), -524288 / std::sqrt(128.0) + std::log(2.0), 0.004);
}

TEST(ReferenceForward, B04_huge_equal_inputs_give_V) {
  Attention a({1, 1, 1, 1, 1, 64, 64}, DType::bf16);
  for (Array* x : {&a.q, &a.k, &a.v}) x->fill(133120);
  run_oracle(a);
  EXPECT_EQ(a.o.values(), std::vector<double>(64, 133120));
}

TEST(ReferenceForward, B09_scale_0_is_uniform_over_visible_keys) {
  Attention a({1, 3, 3, 1, 1, 4, 3}, DType::fp64);
  a.options.scale = 0;
  a.options.causal = Causal::bottom_right;
  a.v.fill_one_hot();
  run_oracle(a);
  EXPECT_NEAR((a.o[{0, 1, 0, 0}]), 0.5, 1e-15);
  EXPECT_EQ((a.o[{0, 1, 0, 2}]), 0);
  EXPECT_NEAR((a.lse[{0, 0, 1}]), std::log(2.0), 1e-15);
}

TEST(ReferenceForward, E01_causal_2_5_and_5_2) {
  Attention wide = counting(2, 5), tall = counting(5, 2);
  wide.options.causal = tall.options.causal = Causal::bottom_right;
  EXPECT_EQ(visible(wide, 0), (Keys{0, 1, 2, 3}));
  EXPECT_EQ(visible(wide, 1), (Keys{0, 1, 2, 3, 4}));
  for (const std::int64_t i : {0, 1, 2}) EXPECT_EQ(visible(tall, i), Keys{});
  EXPECT_EQ(visible(tall, 3), (Keys{0}));
  EXPECT_EQ(visible(tall, 4), (Keys{0, 1}));
  wide.options.causal = tall.options.causal = Causal::top_left;
  EXPECT_EQ(visible(wide, 0), (Keys{0}));
  EXPECT_EQ(visible(tall, 4), (Keys{0, 1}));
}

TEST(ReferenceForward, E04_a_window_of_W_keys_is_left_W_minus_1) {
  Attention a = counting(8, 8);
  a.options.causal = Causal::bottom_right;
  a.options.window = {2, -1};
  EXPECT_EQ(visible(a, 5), (Keys{3, 4, 5}));
  EXPECT_EQ(visible(a, 1), (Keys{0, 1}));
}

TEST(ReferenceForward, E06_windows_that_reach_everything_change_no_bit) {
  Attention plain({1, 6, 9, 1, 1, 4, 4}, DType::fp32);
  plain.options.causal = Causal::bottom_right;
  run_oracle(plain);
  for (const std::int64_t left : {std::int64_t{-1}, std::int64_t{8}, std::numeric_limits<std::int64_t>::max()}) {
    Attention a({1, 6, 9, 1, 1, 4, 4}, DType::fp32);
    a.options.window = {left, 0};
    run_oracle(a);
    EXPECT_TRUE(a.o.same_bits(plain.o)) << left;
  }
}

TEST(ReferenceForward, E11_window_128_leaves_129_keys) {
  Attention a = counting(1, 256);
  a.options.causal = Causal::bottom_right;
  a.options.window = {128, 0};
  const Keys keys = visible(a, 0);
  EXPECT_EQ(keys.size(), 129);
  EXPECT_EQ(keys.front(), 127);
}

TEST(ReferenceForward, chunks_floor_negative_positions) {
  Attention a = counting(3, 4);
  const Array shift = int32_array({-2});
  a.options.shift = shift;
  a.options.chunk = 2;
  EXPECT_EQ(visible(a, 0), Keys{});  // position -2 lies in chunk -1
  EXPECT_EQ(visible(a, 1), Keys{});  // and so does -1, which truncation would put in chunk 0
  EXPECT_EQ(visible(a, 2), (Keys{0, 1}));
}

TEST(ReferenceForward, C08_rows_in_no_sequence_are_empty_also_with_a_sink) {
  Attention a = Attention::packed({0, 6, 7, 1, 1, 4, 2});
  const Array cu_q = int32_array({1, 3, 4}), cu_k = int32_array({0, 2, 5}), sinks(DType::fp32, {1}, {3});
  a.options.cu_seqlens_q = cu_q;
  a.options.cu_seqlens_k = cu_k;
  a.options.sinks = sinks;
  for (const std::int64_t row : {0, 4, 5}) a.q.set({row, 0, 0}, kNaN);
  for (const std::int64_t row : {5, 6}) {
    a.k.set({row, 0, 0}, kNaN);
    a.v.set({row, 0, 0}, kNaN);
  }
  run_oracle(a);
  for (std::int64_t row = 0; row < 6; ++row) {
    const bool used = row >= 1 && row < 4;
    EXPECT_EQ((a.o[{row, 0, 0}] != 0), used) << row;
    EXPECT_EQ(std::isfinite(a.lse[{0, row}]), used) << row;
    EXPECT_FALSE((std::isnan(a.o[{row, 0, 0}]))) << row;
  }
}

TEST(ReferenceForward, H04_unused_slots_and_pages_are_never_read) {
  Attention a({2, 1, 8, 2, 1, 4, 4}, DType::bf16);
  const Array lengths = int32_array({3, 5}), leftpad = int32_array({1, 0});
  Attention clean = a;
  for (Attention* call : {&a, &clean}) {
    call->options.cache_seqlens = lengths;
    call->options.leftpad = leftpad;
  }
  a.v.for_each([&](const Dims& at) {
    const bool used = at[0] == 0 ? at[1] >= 1 && at[1] < 3 : at[1] < 5;
    if (!used) a.v.set(at, kNaN), a.k.set(at, kNaN);
  });
  run_oracle(a);
  run_oracle(clean);
  EXPECT_TRUE(a.o.same_bits(clean.o));
  EXPECT_TRUE(std::isfinite(a.o[{1, 0, 1, 0}]));
}

TEST(ReferenceForward, H15_table_entries_without_visible_keys_are_never_read) {
  Attention a({1, 1, 2, 1, 1, 4, 4}, DType::fp32);
  a.k = Array(DType::fp32, {2, 2, 1, 4}).fill_gaussian(5);
  a.v = Array(DType::fp32, {2, 2, 1, 4}).fill_gaussian(6);
  const Array lengths = int32_array({6});
  Array table(DType::int32, {1, 4}, {-1000000000, 1, 0, 2000000000});
  a.options.cache_seqlens = lengths;
  a.options.block_table = table;
  a.options.window = {3, 0};
  run_oracle(a);
  EXPECT_TRUE(std::isfinite(a.o[{0, 0, 0, 0}]));
}

TEST(ReferenceForward, NaN_stays_in_its_query_row_and_reaches_rows_that_see_its_key) {
  Attention a({1, 3, 3, 1, 1, 4, 2}, DType::fp32);
  a.options.causal = Causal::bottom_right;
  a.q.set({0, 0, 0, 1}, kNaN);
  a.v.set({0, 2, 0, 0}, kNaN);
  run_oracle(a);
  EXPECT_TRUE(std::isnan(a.o[{0, 0, 0, 0}]));
  EXPECT_TRUE(std::isnan(a.lse[{0, 0, 0}]));
  EXPECT_TRUE(std::isfinite(a.o[{0, 1, 0, 0}]));
  EXPECT_TRUE(std::isnan(a.o[{0, 2, 0, 0}]));
}

TEST(ReferenceForward, G06_any_strides_give_the_same_bits) {
  const Attention dense({2, 3, 5, 4, 2, 4, 3}, DType::fp16);
  Attention a = dense, b = dense;
  const auto arranged = [](const Array& from, const Arrangement& arrangement) {
    Array to(from.dtype(), from.shape(), arrangement);
    to.fill([&](const Dims& at) { return from[at]; });
    return to;
  };
  b.q = arranged(a.q, {{0, 2, 1, 3}, 3});
  b.k = arranged(a.k, {{3, 2, 1, 0}, 1});
  b.v = arranged(a.v, {{1, 0, 2, 3}, 2});
  b.o = Array(DType::fp16, a.o.shape(), {{2, 1, 3, 0}, 4});
  run_oracle(a);
  run_oracle(b);
  EXPECT_EQ(a.o.values(), b.o.values());
  EXPECT_EQ(a.lse.values(), b.lse.values());
  EXPECT_TRUE(b.o.gaps_intact());
}

TEST(ReferenceForward, threads_change_no_bit) {
  Attention a({3, 9, 11, 4, 2, 8, 8}), b = a;
  a.options.threads = 1;
  b.options.threads = 5;
  run_oracle(a);
  run_oracle(b);
  EXPECT_TRUE(a.o.same_bits(b.o));
}

TEST(ReferenceForward, plain_rounds_what_three_kernels_store) {
  Attention a({1, 1, 3, 1, 1, 2, 1}, DType::bf16);
  a.options.scale = 1;
  a.q = Array(DType::bf16, {1, 1, 1, 2}, {1, 1});
  a.k = Array(DType::bf16, {1, 3, 1, 2}, {1, 0x1p-9, 1, 0, 1, 0});  // S = 1 + 2^-9 is stored as 1
  a.v = Array(DType::bf16, {1, 3, 1, 1}, {1, 0, 0});
  const reference::ForwardResult plain = reference::plain_forward(a.in(), a.options);
  EXPECT_EQ(plain.o.value[0], reference::round_to(DType::bf16, 1.0 / 3));
  EXPECT_NEAR(plain.lse.value[0], 1 + std::log(3.0), 1e-6);
  EXPECT_NEAR(reference::exact_forward(a.in(), a.options).lse.value[0],
              std::log(std::exp(1 + 0x1p-9) + 2 * std::exp(1.0)), 1e-14);
}

TEST(ReferenceForward, magnitudes_and_largest_logits) {
  Attention a({1, 1, 2, 1, 1, 1, 1}, DType::fp32);
  a.options.scale = 1;
  a.q = Array(DType::fp32, {1, 1, 1, 1}, {2});
  a.k = Array(DType::fp32, {1, 2, 1, 1}, {-3, -3});
  a.v = Array(DType::fp32, {1, 2, 1, 1}, {1, -1});
  const reference::ForwardResult wide = reference::exact_forward(a.in(), a.options);
  EXPECT_EQ(wide.o.value[0], 0);
  EXPECT_NEAR(wide.o.magnitude[0], 1, 1e-15);  // P |V|
  EXPECT_EQ(wide.o.logit[0], 6);
  EXPECT_EQ(wide.lse.logit[0], 6);
  a.q = Array(DType::bf16, {1, 1, 1, 1}, {2});
  EXPECT_EQ(reference::exact_forward(a.in(), a.options).o.magnitude[0], 0);  // |O|
}

}  // namespace
}  // namespace narrows::test
