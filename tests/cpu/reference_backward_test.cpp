// The oracle's backward against central differences of its own forward, one feature at a time.
#include <gtest/gtest.h>

#include <map>

#include "cpu/reference.hpp"
#include "tests/support/attention.hpp"

namespace narrows::test {
namespace {

/// A call in fp64 with every gradient. The loss is sum(dout * O) + sum(dlse * LSE).
struct Differentiated {
  Attention a;
  Array bias, slopes, sinks;
  Array mask, shift, cu_q, cu_k, used_q, used_k;

  explicit Differentiated(Attention attention) : a(std::move(attention)) {
    a.dlse = Array(DType::fp64, a.lse.shape()).fill_gaussian(99);
  }

  Options options() const {
    Options options = a.options;
    options.bias = bias;
    options.alibi_slopes = slopes;
    options.sinks = sinks;
    options.mask = mask;
    options.shift = shift;
    options.cu_seqlens_q = cu_q;
    options.cu_seqlens_k = cu_k;
    options.seqused_q = used_q;
    options.seqused_k = used_k;
    return options;
  }

  double loss() const {
    const reference::ForwardResult result = reference::exact_forward(a.in(), options());
    const std::vector<double> dout = a.dout.values(), dlse = a.dlse.values();
    double sum = 0;
    for (std::size_t at = 0; at < dout.size(); ++at) sum += dout[at] * result.o.value[at];
    for (std::size_t at = 0; at < dlse.size(); ++at)
      if (std::isfinite(result.lse.value[at])) sum += dlse[at] * result.lse.value[at];
    return sum;
  }

  void expect_gradient(const std::string& name, Array& parameter, const reference::Result& gradient) {
    if (!parameter.given()) return;
    ASSERT_EQ(gradient.shape, parameter.shape()) << name;
    constexpr double kStep = 1e-5;
    std::size_t element = 0;
    parameter.for_each([&](const Dims& at) {
      const double value = parameter[at];
      parameter.set(at, value + kStep);
      const double above = loss();
      parameter.set(at, value - kStep);
      const double difference = (above - loss()) / (2 * kStep);
      parameter.set(at, value);
      const double ours = gradient.value[element++];
      EXPECT_NEAR(ours, difference, 2e-8 * (1 + std::abs(difference))) << name << " element " << element - 1;
      EXPECT_LE(std::abs(ours), gradient.magnitude[element - 1] + 1e-13) << name << " element " << element - 1;
    });
  }

  void check() {
    a.options.threads = 1;
    BackwardInputs in = a.backward_in();
    in.o = in.lse = Tensor{};
    const reference::BackwardResult exact = reference::exact_backward(in, options());
    expect_gradient("q", a.q, exact.dq);
    expect_gradient("k", a.k, exact.dk);
    expect_gradient("v", a.v, exact.dv);
    expect_gradient("bias", bias, exact.dbias);
    expect_gradient("alibi_slopes", slopes, exact.dslopes);
    expect_gradient("sinks", sinks, exact.dsinks);
  }
};

Differentiated dense(const Sizes& sizes = {2, 3, 4, 2, 1, 3, 2}) {
  return Differentiated(Attention(sizes, DType::fp64, 7));
}

Array gaussian(const Dims& shape, std::uint64_t seed) { return Array(DType::fp64, shape).fill_gaussian(seed); }

TEST(ReferenceBackward, dense) { dense().check(); }

TEST(ReferenceBackward, J01_loss_of_lse_alone) {
  Differentiated call = dense();
  call.a.dout.fill(0);
  call.check();
}

TEST(ReferenceBackward, no_dlse) {
  Differentiated call = dense();
  BackwardInputs in = call.a.backward_in();
  in.o = in.lse = Tensor{};
  call.a.dlse.fill(0);
  const reference::BackwardResult zero = reference::exact_backward(in, call.options());
  in.dlse = Tensor{};
  EXPECT_EQ(reference::exact_backward(in, call.options()).dq.value, zero.dq.value);
  call.check();
}

TEST(ReferenceBackward, grouped_heads_and_another_value_dim) { dense({1, 3, 4, 6, 2, 2, 5}).check(); }

TEST(ReferenceBackward, scale_negative_and_zero) {
  Differentiated call = dense();
  for (const double scale : {-0.7, 0.0, 2.0}) {
    call.a.options.scale = scale;
    call.check();
  }
}

TEST(ReferenceBackward, causal_with_empty_rows) {
  Differentiated call = dense({1, 5, 3, 2, 2, 3, 2});
  for (const Causal causal : {Causal::bottom_right, Causal::top_left}) {
    call.a.options.causal = causal;
    call.check();
  }
}

TEST(ReferenceBackward, window_chunk_and_shift) {
  Differentiated call = dense({2, 4, 5, 1, 1, 2, 2});
  call.a.options.window = {1, 2};
  call.check();
  call.a.options.window = {};
  call.a.options.chunk = 2;
  call.shift = int32_array({2, -3});
  call.check();
}

TEST(ReferenceBackward, I02_softcap) {
  Differentiated call = dense();
  call.a.options.softcap = 0.8;
  call.slopes = Array(DType::fp64, {2}, {0.5, 0.25});
  call.check();
}

TEST(ReferenceBackward, alibi_slopes_by_head_and_by_sequence) {
  Differentiated call = dense();
  call.slopes = Array(DType::fp64, {2}, {0.5, 0.25});
  call.check();
  call.slopes = Array(DType::fp64, {2, 2}, {0.5, 0.25, 1, -0.125});
  call.a.options.causal = Causal::bottom_right;
  call.check();
}

TEST(ReferenceBackward, I12_every_broadcast_of_bias) {
  for (int axes = 0; axes < 16; ++axes) {
    Differentiated call = dense();
    const Dims full{2, 2, 3, 4};
    Dims shape = full;
    for (int axis = 0; axis < 4; ++axis)
      if (axes >> axis & 1) shape[static_cast<std::size_t>(axis)] = 1;
    call.bias = gaussian(shape, 31);
    call.check();
  }
  for (const Dims& shape : {Dims{4}, Dims{3, 4}, Dims{3, 1}, Dims{2, 1, 4}}) {
    Differentiated call = dense();
    call.bias = gaussian(shape, 32);
    call.a.options.softcap = 1.5;
    call.check();
  }
}

TEST(ReferenceBackward, bias_of_minus_infinity_has_no_gradient) {
  Differentiated call = dense();
  call.bias = gaussian({2, 1, 3, 4}, 33);
  for (std::int64_t j = 0; j < 4; ++j) call.bias.set({1, 0, 2, j}, -kInfinite);
  call.bias.set({0, 0, 1, 2}, -kInfinite);
  call.check();
}

TEST(ReferenceBackward, A14_mask_with_an_empty_row) {
  Differentiated call = dense();
  call.mask =
      Array(DType::boolean, {2, 1, 3, 4}, {1, 0, 1, 1, 0, 1, 0, 1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 1, 0, 0, 1, 0});
  call.check();
}

TEST(ReferenceBackward, sinks_also_in_empty_rows) {
  Differentiated call = dense({2, 4, 2, 3, 1, 3, 2});
  call.a.options.causal = Causal::bottom_right;
  call.sinks = Array(DType::fp64, {3}, {0.5, -1, 2});
  call.check();
}

TEST(ReferenceBackward, a_sink_of_minus_infinity_has_gradient_0) {
  Differentiated call = dense({1, 4, 2, 2, 1, 3, 2});
  call.a.options.causal = Causal::bottom_right;
  call.sinks = Array(DType::fp64, {2}, {-kInfinite, 0.3});
  call.check();
  BackwardInputs in = call.a.backward_in();
  in.o = in.lse = Tensor{};
  EXPECT_EQ(reference::exact_backward(in, call.options()).dsinks.value[0], 0);
}

TEST(ReferenceBackward, dropout) {
  Differentiated call = dense({2, 3, 11, 2, 1, 3, 2});
  call.a.options.dropout = 0.4;
  call.a.options.seed = 1234;
  call.a.options.offset = 5;
  call.a.options.origin = {1, 2, 3, 4, 9};
  call.sinks = Array(DType::fp64, {2}, {0.5, 1});
  call.check();
}

TEST(ReferenceBackward, C01_varlen_with_sequences_of_no_keys) {
  Differentiated call(Attention::packed({0, 7, 8, 2, 1, 3, 2}, DType::fp64, 8));
  call.cu_q = int32_array({0, 0, 3, 4, 6});
  call.cu_k = int32_array({0, 2, 5, 5, 7});
  call.slopes = Array(DType::fp64, {4, 2}, {1, 2, 3, 4, 5, 6, 7, 8});
  call.check();
  call.a.options.causal = Causal::bottom_right;
  call.sinks = Array(DType::fp64, {2}, {0.5, 1});
  call.check();
}

TEST(ReferenceBackward, seqused_dense_and_varlen) {
  Differentiated call = dense();
  call.used_q = int32_array({3, 1});
  call.used_k = int32_array({2, 4});
  call.sinks = Array(DType::fp64, {2}, {0.5, 1});
  call.check();
  Differentiated packed(Attention::packed({0, 6, 7, 2, 2, 3, 2}, DType::fp64, 9));
  packed.cu_q = int32_array({0, 3, 6});
  packed.cu_k = int32_array({0, 4, 7});
  packed.used_q = int32_array({2, 3});
  packed.used_k = int32_array({0, 2});
  packed.check();
}

TEST(ReferenceBackward, everything_at_once) {
  Differentiated call = dense({2, 3, 9, 4, 2, 3, 2});
  call.a.options.causal = Causal::bottom_right;
  call.a.options.window = {6, 0};
  call.a.options.softcap = 2;
  call.a.options.dropout = 0.3;
  call.a.options.seed = 3;
  call.bias = gaussian({1, 4, 1, 9}, 41);
  call.slopes = Array(DType::fp64, {4}, {0.5, 0.25, 0.125, 1});
  call.sinks = Array(DType::fp64, {4}, {0.5, 1, -1, 0});
  call.check();
}

TEST(ReferenceBackward, C08_slack_rows_get_zero_and_their_NaN_stays_outside) {
  Attention a = Attention::packed({0, 5, 6, 1, 1, 2, 2}, DType::bf16);
  const Array cu_q = int32_array({0, 2, 4}), cu_k = int32_array({0, 3, 4});
  a.options.cu_seqlens_q = cu_q;
  a.options.cu_seqlens_k = cu_k;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (Array* rows : {&a.q, &a.dout}) rows->set({4, 0, 0}, nan);
  for (Array* rows : {&a.k, &a.v}) rows->set({4, 0, 1}, nan);
  reference::forward(a.in(), a.out(), a.options);
  reference::backward(a.backward_in(), a.gradients(), a.options);
  for (const double value : a.dq.values()) EXPECT_TRUE(std::isfinite(value));
  EXPECT_EQ((a.dq[{4, 0, 0}]), 0);
  for (const std::int64_t row : {4, 5}) {
    EXPECT_EQ((a.dk[{row, 0, 1}]), 0);
    EXPECT_EQ((a.dv[{row, 0, 0}]), 0);
  }
  EXPECT_NE((a.dv[{3, 0, 0}]), 0);
}

// P = 1 wherever a key is visible: lse = 0, o = 0, v = 0 and no scores, so that sums count.
TEST(ReferenceBackward, given_lse_and_o_are_used_and_count_pairs) {
  Attention a({1, 3, 5, 1, 1, 5, 3}, DType::fp32);
  a.options.causal = Causal::bottom_right;
  a.options.scale = 1;
  for (Array* zero : {&a.q, &a.v, &a.o, &a.lse, &a.dout}) zero->fill(0);
  a.dlse = Array(DType::fp32, a.lse.shape()).fill(1);
  a.k.fill_one_hot();
  reference::backward(a.backward_in(), a.gradients(), a.options);
  EXPECT_EQ(a.dq.values(), (std::vector<double>{1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1}));

  a.k.fill(0);
  a.dlse.fill(0);
  a.dout.fill_one_hot();
  reference::backward(a.backward_in(), a.gradients(), a.options);
  EXPECT_EQ(a.dv.values(), (std::vector<double>{1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0, 0, 1}));
}

TEST(ReferenceBackward, a_rounded_lse_never_makes_a_weight_above_1) {
  Attention a({1, 1, 1, 1, 1, 1, 1}, DType::fp64);
  a.o.fill(0);
  a.lse.fill(-1000);
  a.dout.fill(1);
  reference::backward(a.backward_in(), a.gradients(), a.options);
  EXPECT_EQ((a.dv[{0, 0, 0, 0}]), 1);
}

TEST(ReferenceBackward, threads_change_no_bit) {
  Attention a({2, 7, 9, 4, 2, 8, 8}, DType::fp32);
  reference::forward(a.in(), a.out(), a.options);
  Attention b = a;
  a.options.threads = 1;
  b.options.threads = 4;
  reference::backward(a.backward_in(), a.gradients(), a.options);
  reference::backward(b.backward_in(), b.gradients(), b.options);
  EXPECT_TRUE(a.dq.same_bits(b.dq));
  EXPECT_TRUE(a.dk.same_bits(b.dk));
  EXPECT_TRUE(a.dv.same_bits(b.dv));
}

TEST(ReferenceBackward, no_queries_or_keys_or_heads) {
  for (const Sizes& sizes : {Sizes{2, 0, 3, 2, 1, 4, 4}, Sizes{2, 3, 0, 2, 1, 4, 4}, Sizes{0, 3, 3, 2, 1, 4, 4},
                             Sizes{2, 3, 3, 0, 0, 4, 4}}) {
    Attention a(sizes);
    reference::forward(a.in(), a.out(), a.options);
    reference::backward(a.backward_in(), a.gradients(), a.options);
    for (const Array* gradient : {&a.o, &a.dq, &a.dk, &a.dv})
      for (const double value : gradient->values()) EXPECT_EQ(value, 0);
  }
}

}  // namespace
}  // namespace narrows::test
