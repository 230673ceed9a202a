// Backward calls that other libraries got wrong (ids: tests/reported.md), layouts, hidden NaN, bits.
#include "tests/cpu/backward_run.hpp"
#include "tests/cpu/forward_run.hpp"

#include <sys/mman.h>
#include <cmath>

namespace narrows::test {
namespace {

TEST(CpuBackward, A07_rows_without_keys_have_no_gradient) {
  BackwardCase c(Attention::packed({.sq = 256, .sk = 3, .h = 1, .hk = 1, .d = 32, .dv = 32}, DType::fp16));
  for (Array* array : {&c.q, &c.k, &c.v}) array->fill_gaussian(7, 3);
  c.dout.fill(1);
  const Array cu_q = int32_array({0, 76, 110, 256}), cu_k = int32_array({0, 1, 2, 3});
  c.options.cu_seqlens_q = cu_q;
  c.options.cu_seqlens_k = cu_k;
  c.options.causal = Causal::bottom_right;
  expect_right(c);
  for (std::int64_t i = 0; i < 75; ++i)
    for (std::int64_t x = 0; x < 32; ++x) ASSERT_EQ(c.dq.at({i, 0, x}), 0);
}

TEST(CpuBackward, A14_an_empty_row_of_nan_contributes_nothing) {
  BackwardCase c({.b = 2, .sq = 4, .sk = 4, .h = 2, .hk = 2, .d = 8, .dv = 8});
  c.mask = Array(DType::boolean, {2, 1, 1, 4});
  c.mask.fill([](const Dims& at) { return at[0] == 0 || at[3] < 2 ? 1.0 : 0.0; });
  c.options.mask = c.mask;
  c.options.window = {0, 0};  // rows 2 and 3 of item 2 see nothing
  for (std::int64_t i : {2, 3})
    for (std::int64_t x = 0; x < 8; ++x)
      for (Array* array : {&c.q, &c.k, &c.v, &c.dout}) array->set({1, i, 0, x}, kNaN);
  expect_right(c);
  for (const Array* array : {&c.dq, &c.dk, &c.dv})
    for (const double value : array->values()) ASSERT_TRUE(std::isfinite(value));
}

TEST(CpuBackward, B08_tiny_and_constant_inputs) {
  for (const double size : {1e-30, 0.2, 1000.0}) {
    SCOPED_TRACE(size);
    BackwardCase c({.b = 1, .sq = 20, .sk = 33, .h = 2, .hk = 2, .d = 16, .dv = 16});
    for (Array* array : {&c.q, &c.k, &c.v})
      if (size < 1)
        array->fill_gaussian(5, size);
      else
        array->fill(size);
    expect_right(c);
  }
}

TEST(CpuBackward, C01_keys_of_no_query_and_of_no_sequence) {
  BackwardCase c(Attention::packed({.sq = 204, .sk = 819, .h = 4, .hk = 1, .d = 256, .dv = 256}, DType::bf16));
  const Array cu_q = int32_array({0, 0, 120, 204, 204}), cu_k = int32_array({0, 253, 428, 512, 719});
  c.options.cu_seqlens_q = cu_q;
  c.options.cu_seqlens_k = cu_k;
  expect_right(c);
  for (std::int64_t j = 0; j < 819; ++j) {
    if (j >= 253 && j < 512) continue;
    for (std::int64_t x = 0; x < 256; ++x) {
      ASSERT_EQ(c.dk.at({j, 0, x}), 0) << j;
      ASSERT_EQ(c.dv.at({j, 0, x}), 0) << j;
    }
  }
}

TEST(CpuBackward, C08_slack_rows_of_nan_get_zeros_and_reach_nothing) {
  for (const bool bias : {false, true}) {
    BackwardCase c(Attention::packed({.sq = 60, .sk = 90, .h = 2, .hk = 1, .d = 8, .dv = 8}));
    const Array cu_q = int32_array({0, 20, 50}), cu_k = int32_array({0, 33, 80}), used_k = int32_array({30, 47});
    const Array used_q = int32_array({18, 30});
    c.options.cu_seqlens_q = cu_q;
    c.options.cu_seqlens_k = cu_k;
    c.options.seqused_k = used_k;
    c.options.seqused_q = used_q;
    c.options.causal = Causal::bottom_right;
    if (bias) c.with_bias({1, 1, 40, 64}).with_sinks({1, 2});
    c.with_dlse();
    const auto unused = [&](std::int64_t row, std::initializer_list<Array*> arrays) {
      for (Array* array : arrays)
        for (std::int64_t h = 0; h < array->shape()[1]; ++h)
          for (std::int64_t x = 0; x < 8; ++x) array->set({row, h, x}, kNaN);
    };
    for (std::int64_t i : {18, 19, 50, 55, 59}) unused(i, {&c.q, &c.dout});
    for (std::int64_t j : {30, 32, 80, 89}) unused(j, {&c.k, &c.v});
    c.forward_by_oracle();
    for (std::int64_t i : {18, 19, 50, 55, 59}) {
      unused(i, {&c.o});
      for (std::int64_t h = 0; h < 2; ++h) {
        c.lse.set({h, i}, kNaN);
        c.dlse.set({h, i}, kNaN);
      }
    }
    c.run();
    EXPECT_TRUE(c.agrees());
    for (std::int64_t i : {18, 19, 50, 59}) EXPECT_EQ(c.dq.at({i, 1, 3}), 0);
    for (std::int64_t j : {30, 31, 32, 80, 89}) {
      EXPECT_EQ(c.dk.at({j, 0, 3}), 0);
      EXPECT_EQ(c.dv.at({j, 0, 3}), 0);
    }
  }
}

TEST(CpuBackward, H22_hidden_keys_and_rows_of_nan_reach_nothing) {
  BackwardCase c({.b = 1, .sq = 30, .sk = 40, .h = 2, .hk = 1, .d = 8, .dv = 8});
  c.with_bias({1, 1, 30, 40}).with_sinks({0, 1});
  c.mask = Array(DType::boolean, {40}).fill([](const Dims& at) { return at[0] == 9 ? 0.0 : 1.0; });
  c.options.mask = c.mask;
  c.bias.fill([](const Dims& at) {
    return at[2] == 4 || at[3] == 21 ? -std::numeric_limits<double>::infinity() : 0.25 * static_cast<double>(at[3] % 4);
  });
  for (std::int64_t x = 0; x < 8; ++x) {
    for (std::int64_t j : {9, 21})
      for (Array* array : {&c.k, &c.v}) array->set({0, j, 0, x}, kNaN);
    for (std::int64_t h = 0; h < 2; ++h) c.q.set({0, 4, h, x}, kNaN);
  }
  expect_right(c);
  for (const Array* array : c.results())
    for (const double value : array->values()) ASSERT_TRUE(std::isfinite(value));
}

TEST(CpuBackward, keys_between_rows_bounds_and_rows_without_keys_of_nan_reach_nothing) {
  BackwardCase c({.b = 1, .sq = 60, .sk = 90, .h = 2, .hk = 1, .d = 8, .dv = 8});
  c.with_bias({1, 1, 60, 90}).with_sinks({0, 1});
  // Rows see keys 5..29 or 50..79, and row 7 nothing.
  const auto low = [](const Dims& at) { return at[1] % 2 == 0; };
  const Array begin = Array(DType::int32, {1, 60}).fill([&](const Dims& at) { return low(at) ? 5 : 50; });
  const Array end = Array(DType::int32, {1, 60}).fill([&](const Dims& at) {
    return at[1] == 7 ? 50 : low(at) ? 30 : 80;
  });
  c.options.key_begin = begin;
  c.options.key_end = end;
  for (std::int64_t x = 0; x < 8; ++x) {
    for (std::int64_t j : {4, 30, 41, 49, 80})
      for (Array* array : {&c.k, &c.v}) array->set({0, j, 0, x}, kNaN);
    for (std::int64_t h = 0; h < 2; ++h) c.q.set({0, 7, h, x}, kNaN);
  }
  expect_right(c);
  for (const Array* array : c.results())
    for (const double value : array->values()) ASSERT_TRUE(std::isfinite(value));
  for (std::int64_t x = 0; x < 8; ++x) EXPECT_EQ(c.dk.at({0, 41, 0, x}), 0);
}

TEST(CpuBackward, a_row_of_which_the_lse_says_that_no_key_weighs_is_not_read) {
  BackwardCase c({.b = 1, .sq = 30, .sk = 40, .h = 2, .hk = 1, .d = 8, .dv = 8});
  c.forward_by_oracle();
  c.lse.set({0, 1, 5}, -std::numeric_limits<double>::infinity());
  for (std::int64_t x = 0; x < 8; ++x)
    for (Array* array : {&c.q, &c.o, &c.dout}) array->set({0, 5, 1, x}, kNaN);
  c.run();
  EXPECT_EQ(c.dq.at({0, 5, 1, 3}), 0);
  for (const Array* array : c.results())
    for (const double value : array->values()) ASSERT_TRUE(std::isfinite(value));
}

TEST(CpuBackward, nan_of_a_row_stays_in_its_row_of_dq) {
  BackwardCase c({.b = 1, .sq = 30, .sk = 40, .h = 2, .hk = 1, .d = 8, .dv = 8});
  c.forward_by_oracle();
  c.q.set({0, 11, 1, 2}, kNaN);
  c.run();
  for (std::int64_t i = 0; i < 30; ++i)
    for (std::int64_t h = 0; h < 2; ++h)
      EXPECT_EQ(std::isnan(c.dq.at({0, i, h, 0})), i == 11 && h == 1) << i << " " << h;
  EXPECT_TRUE(std::isnan(c.dk.at({0, 5, 0, 2})));
}

TEST(CpuBackward, F03_value_dims_that_differ_from_the_head_dim) {
  for (const std::int64_t dv : {8, 16, 24, 40, 48, 72, 80, 88, 96, 104, 112, 120}) {
    SCOPED_TRACE(dv);
    BackwardCase c({.b = 1, .sq = 33, .sk = 47, .h = 2, .hk = 1, .d = 128, .dv = dv}, DType::bf16);
    expect_right(c);
  }
}

TEST(CpuBackward, F05_structured_values_wide_heads_and_bshd_strides) {
  BackwardCase c({.b = 2, .sq = 70, .sk = 70, .h = 16, .hk = 2, .d = 256, .dv = 256}, DType::bf16);
  for (Array* array : {&c.q, &c.k, &c.v, &c.dout, &c.dq, &c.dk, &c.dv})
    *array = Array(DType::bf16, array->shape(), Arrangement{.order = {1, 0, 2, 3}});  // sequence outermost
  c.q.fill_structured(0.1);
  c.k.fill_structured(1.3);
  c.v.fill_structured(2.9);
  c.dout.fill_structured(0.7);
  c.options.causal = Causal::bottom_right;
  expect_right(c, {.query_block = 48, .key_block = 64, .key_chunk = 64});
}

TEST(CpuBackward, G01_G10_any_strides_and_gaps_stay_untouched) {
  const Arrangement arrangements[] = {
      {.order = {0, 2, 1, 3}, .gap = 0}, {.order = {3, 1, 0, 2}, .gap = 3}, {.order = {}, .gap = 5}};
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16, DType::fp64})
    for (const Arrangement& arrangement : arrangements) {
      BackwardCase c({.b = 2, .sq = 32, .sk = 32, .h = 4, .hk = 1, .d = 16, .dv = 16}, dtype);
      for (Array* array : {&c.q, &c.k, &c.v, &c.dq, &c.dk, &c.dv}) *array = Array(dtype, array->shape(), arrangement);
      c.dout = Array(dtype, c.o.shape(), Arrangement{.order = {2, 0, 1, 3}, .gap = 1});
      std::uint64_t seed = 9;
      for (Array* array : {&c.q, &c.k, &c.v, &c.dout}) array->fill_gaussian(++seed);
      expect_right(c);
      for (const Array* array : {&c.dq, &c.dk, &c.dv}) EXPECT_TRUE(array->gaps_intact());
    }
}

TEST(CpuBackward, negative_strides) {
  BackwardCase c({.b = 2, .sq = 30, .sk = 40, .h = 4, .hk = 2, .d = 8, .dv = 8});
  BackwardInputs in = c.backward_in();
  Gradients out = c.wanted();
  for (const std::size_t axis : {std::size_t{1}, std::size_t{3}})
    for (Tensor* tensor : {&in.q, &in.k, &in.v, &in.o, &in.dout, &out.dq, &out.dk, &out.dv})
      *tensor = reversed(*tensor, axis);
  reference::forward({in.q, in.k, in.v}, {in.o, in.lse}, c.options);
  run_backward(in, out, c.options);
  EXPECT_TRUE(backward_agrees(in, out, c.options));
}

TEST(CpuBackward, G05_expanded_gradients_of_o) {
  BackwardCase c({.b = 1, .sq = 1, .sk = 65536, .h = 1, .hk = 1, .d = 8, .dv = 8});
  c.forward_by_oracle();
  BackwardInputs in = c.backward_in();
  for (std::size_t axis = 0; axis < 4; ++axis) in.dout.strides[axis] = 0;
  run_backward(in, c.wanted(), c.options, {.key_block = 128, .key_chunk = 512, .partials = 8});
  EXPECT_TRUE(backward_agrees(in, c.wanted(), c.options));
}

TEST(CpuBackward, D04_offsets_beyond_32_bits) {
  BackwardCase c(Attention::packed({.sq = 6, .sk = 9, .h = 2, .hk = 1, .d = 8, .dv = 8}));
  const Array cu_q = int32_array({0, 6}), cu_k = int32_array({0, 9});
  c.options.cu_seqlens_q = cu_q;
  c.options.cu_seqlens_k = cu_k;
  c.forward_by_oracle();
  c.run();
  const std::int64_t step = std::int64_t{1} << 29;  // elements: row 5 lies 10 GiB away
  const std::size_t bytes = static_cast<std::size_t>(5 * step + 16) * sizeof(float);
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space for 10 GiB";
  BackwardInputs in = c.backward_in();
  in.dout = view(static_cast<float*>(memory), {6, 2, 8}, {step, 8, 1});
  for (std::int64_t i = 0; i < 6; ++i)
    for (std::int64_t h = 0; h < 2; ++h)
      for (std::int64_t x = 0; x < 8; ++x)
        static_cast<float*>(memory)[i * step + h * 8 + x] = static_cast<float>(c.dout.at({i, h, x}));
  const Array dq = c.dq, dk = c.dk, dv = c.dv;
  c.poison_results();
  run_backward(in, c.wanted(), c.options);
  munmap(memory, bytes);
  EXPECT_TRUE(c.dq.same_bits(dq) && c.dk.same_bits(dk) && c.dv.same_bits(dv));
}

TEST(CpuBackward, I03_softcap_with_causal) {
  BackwardCase c({.b = 2, .sq = 200, .sk = 200, .h = 2, .hk = 2, .d = 128, .dv = 128}, DType::bf16);
  c.options.causal = Causal::bottom_right;
  c.options.softcap = 10;
  expect_right(c, {.query_block = 96, .key_block = 128, .key_chunk = 128});
}

TEST(CpuBackward, I13_gradient_of_an_fp32_bias_in_a_bf16_call) {
  BackwardCase c({.b = 8, .sq = 128, .sk = 128, .h = 4, .hk = 4, .d = 32, .dv = 32}, DType::bf16);
  c.with_bias({1, 4, 128, 128});
  expect_right(c);
  for (const double value : c.dbias.values()) ASSERT_TRUE(std::isfinite(value));
}

TEST(CpuBackward, J01_the_gradient_of_the_lse_counts) {
  BackwardCase c({.b = 1, .sq = 40, .sk = 60, .h = 2, .hk = 1, .d = 16, .dv = 16});
  c.with_dlse();
  expect_right(c);
  c.dout.fill(0);
  c.run();
  EXPECT_TRUE(c.agrees());
  double largest = 0;
  for (const double value : c.dk.values()) largest = std::max(largest, std::abs(value));
  EXPECT_GT(largest, 0.1);
}

TEST(CpuBackward, extreme_logits) {
  for (const double size : {30.0, 2000.0, 1e6}) {
    SCOPED_TRACE(size);
    BackwardCase c({.b = 1, .sq = 20, .sk = 33, .h = 2, .hk = 2, .d = 8, .dv = 8});
    c.q.fill_gaussian(3, size);
    expect_right(c);
  }
}

/// A caller's workspace may begin anywhere and hold anything; nothing beyond what was asked for is written.
TEST(CpuBackward, workspace_of_the_caller) {
  BackwardCase c({.b = 2, .sq = 90, .sk = 700, .h = 4, .hk = 2, .d = 24, .dv = 16});
  c.with_bias({1, 4, 1, 700}).with_slopes({4}).with_sinks({0, 1, 2, 3}).with_dropout(0.2);
  c.options.softcap = 5;
  c.options.causal = Causal::bottom_right;
  c.forward_by_oracle();
  c.poison_results();
  backward(c.backward_in(), c.wanted(), c.options);
  EXPECT_TRUE(c.agrees());
  std::vector<Array> first;
  for (const Array* array : c.results()) first.push_back(*array);
  const std::int64_t size = backward_workspace_size({c.q, c.k, c.v}, c.options);
  constexpr std::int64_t kGuard = 256;
  for (const std::int64_t offset : {0, 1, 63}) {
    std::vector<std::uint8_t> memory(static_cast<std::size_t>(size + 2 * kGuard), 0xFF);
    c.options.workspace = view(memory.data() + kGuard + offset - 63, {size});
    c.poison_results();
    backward(c.backward_in(), c.wanted(), c.options);
    for (std::size_t x = 0; x < first.size(); ++x) EXPECT_TRUE(c.results()[x]->same_bits(first[x])) << x;
    const auto outside = [](std::uint8_t byte) { return byte == 0xFF; };
    EXPECT_TRUE(std::all_of(memory.begin(), memory.begin() + kGuard + offset - 63, outside));
    EXPECT_TRUE(std::all_of(memory.begin() + kGuard + offset - 63 + size, memory.end(), outside));
  }
  std::vector<std::uint8_t> small(static_cast<std::size_t>(size - 1));
  c.options.workspace = view(small.data(), {size - 1});
  EXPECT_THROW(backward(c.backward_in(), c.wanted(), c.options), Error);
}

TEST(CpuBackward, zero_sizes) {
  for (const Sizes& s :
       {Sizes{.b = 0, .sq = 3, .sk = 4, .h = 2, .hk = 1}, Sizes{.b = 2, .sq = 0, .sk = 4, .h = 2, .hk = 1},
        Sizes{.b = 2, .sq = 3, .sk = 0, .h = 2, .hk = 1}, Sizes{.b = 2, .sq = 3, .sk = 4, .h = 0, .hk = 0},
        Sizes{.b = 2, .sq = 3, .sk = 4, .h = 0, .hk = 2}}) {
    BackwardCase c(s);
    c.with_bias({1, s.h, s.sq, s.sk}).with_slopes({s.h});
    expect_right(c);
    for (const Array* array : c.results())
      for (const double value : array->values()) EXPECT_EQ(value, 0);
  }
}

}  // namespace
}  // namespace narrows::test
