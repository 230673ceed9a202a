// The blocked backward against the oracle: types, shapes, rules and layouts.
#include "tests/cpu/backward_run.hpp"
#include "tests/cpu/forward_run.hpp"
#include "tests/support/row_bounds.hpp"

namespace narrows::test {
namespace {

TEST(CpuBackward, every_type_and_instruction_set) {
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16, DType::fp64})
    for (const std::string& set : instruction_sets()) {
      SCOPED_TRACE(std::string(name(dtype)) + " " + set);
      BackwardCase c({.b = repeats(2, 1), .sq = 53, .sk = repeats(151, 83), .h = 4, .hk = 2, .d = 24, .dv = 40}, dtype);
      c.options.causal = Causal::bottom_right;
      expect_right(c, {.instruction_set = set});
    }
}

TEST(CpuBackward, plan_as_made) {
  BackwardCase c({.b = 1, .sq = 203, .sk = 531, .h = 2, .hk = 1, .d = 64, .dv = 64}, DType::bf16);
  c.forward_by_oracle();
  c.poison_results();
  backward(c.backward_in(), c.wanted(), c.options);
  EXPECT_TRUE(c.agrees());
}

TEST(CpuBackward, masks) {
  struct Rule {
    Causal causal;
    Window window;
    std::int64_t chunk;
  };
  for (const Rule& rule :
       {Rule{Causal::top_left, {}, 0}, Rule{Causal::none, {9, 3}, 0}, Rule{Causal::none, {-1, 0}, 0},
        Rule{Causal::bottom_right, {40, -1}, 0}, Rule{Causal::bottom_right, {}, 17}, Rule{Causal::none, {}, 50}})
    for (const auto& [sq, sk] : {std::pair{61, 150}, std::pair{150, 61}, std::pair{1, 97}, std::pair{97, 1}}) {
      SCOPED_TRACE(testing::Message() << "window " << rule.window.left << " " << rule.window.right << " chunk "
                                      << rule.chunk << " sq " << sq << " sk " << sk);
      BackwardCase c({.b = 1, .sq = sq, .sk = sk, .h = 3, .hk = 1, .d = 8, .dv = 8});
      c.options.causal = rule.causal;
      c.options.window = rule.window;
      c.options.chunk = rule.chunk;
      expect_right(c);
    }
}

TEST(CpuBackward, boolean_mask_and_empty_rows) {
  BackwardCase c({.b = 2, .sq = 40, .sk = 70, .h = 2, .hk = 2, .d = 16, .dv = 16});
  c.mask = Array(DType::boolean, {2, 1, 40, 70});
  Gaussian random(3);
  c.mask.fill([&](const Dims& at) { return at[2] != 7 && random.uniform() < 0.5 ? 1.0 : 0.0; });
  c.options.mask = c.mask;
  expect_right(c);
  for (std::int64_t x = 0; x < 16; ++x) EXPECT_EQ(c.dq.at({1, 7, 1, x}), 0);
}

TEST(CpuBackward, bounds_of_rows) {
  for (const auto& [sq, sk] : {std::pair{61, 150}, std::pair{150, 61}, std::pair{1, 97}, std::pair{97, 1}})
    for (const bool packed : {false, true})
      for (int rules = 0; rules < 3; ++rules) {
        SCOPED_TRACE(testing::Message() << "sq " << sq << " sk " << sk << " packed " << packed << " rules " << rules);
        const Sizes sizes{.b = packed ? 1 : 2, .sq = sq, .sk = sk, .h = 4, .hk = 2, .d = 8, .dv = 12};
        BackwardCase c = packed ? BackwardCase(Attention::packed(sizes)) : BackwardCase(sizes);
        const Array cu_q = int32_array({0, static_cast<double>(sq / 3), static_cast<double>(sq)}),
                    cu_k = int32_array({0, static_cast<double>(sk / 2), static_cast<double>(sk)});
        if (packed) {
          c.options.cu_seqlens_q = cu_q;
          c.options.cu_seqlens_k = cu_k;
        }
        const RandomBounds bounds(static_cast<std::uint64_t>(sq), c.q.shape(), sk);
        if (rules != 1) c.options.key_begin = bounds.begin;
        if (rules != 2) c.options.key_end = bounds.end;
        c.options.causal = rules == 2 ? Causal::bottom_right : Causal::none;
        if (rules == 0) c.with_bias({1, 4, sq, sk}).with_slopes({4}).with_sinks({0, 1, -1, 0.5}).with_dlse();
        if (rules == 1) c.with_dropout(0.3).with_bias({1, 1, 1, sk});
        expect_right(c);
      }
}

TEST(CpuBackward, bias_of_every_broadcast) {
  for (int axes = 0; axes < 16; ++axes) {
    SCOPED_TRACE(axes);
    BackwardCase c({.b = 2, .sq = 29, .sk = 75, .h = 4, .hk = 2, .d = 8, .dv = 8});
    c.with_bias({axes & 1 ? 2 : 1, axes & 2 ? 4 : 1, axes & 4 ? 29 : 1, axes & 8 ? 75 : 1});
    c.options.causal = Causal::bottom_right;
    expect_right(c);
  }
}

TEST(CpuBackward, bias_of_low_rank_and_other_types) {
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp64}) {
    BackwardCase c({.b = 2, .sq = 29, .sk = 75, .h = 2, .hk = 2, .d = 8, .dv = 8});
    c.with_bias({29, 75}, dtype);
    expect_right(c);
    BackwardCase exact({.b = 2, .sq = 9, .sk = 15, .h = 2, .hk = 2, .d = 8, .dv = 8}, DType::fp64);
    exact.with_bias({15}, dtype);
    expect_right(exact);
  }
}

TEST(CpuBackward, bias_of_minus_infinity_masks) {
  BackwardCase c({.b = 1, .sq = 30, .sk = 64, .h = 2, .hk = 1, .d = 8, .dv = 8});
  c.with_bias({1, 2, 30, 64});
  c.bias.fill([](const Dims& at) {
    return at[2] == 4 || (at[2] * 7 + at[3]) % 3 == 0 ? -std::numeric_limits<double>::infinity()
                                                      : 0.1 * static_cast<double>(at[3] % 5);
  });
  c.options.bias = c.bias;
  expect_right(c);
  for (std::int64_t j = 0; j < 64; ++j) EXPECT_EQ(c.dbias.at({0, 1, 4, j}), 0);
}

TEST(CpuBackward, softcap_slopes_sinks_and_dlse) {
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp64})
    for (const bool per_batch : {false, true}) {
      SCOPED_TRACE(testing::Message() << name(dtype) << " " << per_batch);
      BackwardCase c({.b = 2, .sq = 45, .sk = 90, .h = 4, .hk = 2, .d = 16, .dv = 16}, dtype);
      c.with_bias({4, 1, 90}).with_slopes(per_batch ? Dims{2, 4} : Dims{4}).with_dlse();
      c.with_sinks({0.5, -1, -std::numeric_limits<double>::infinity(), 3});
      c.options.softcap = 1.5;
      c.options.causal = Causal::bottom_right;
      expect_right(c);
      EXPECT_EQ(c.dsinks.at({2}), 0);
    }
}

TEST(CpuBackward, rules_one_by_one) {
  for (int rule = 0; rule < 6; ++rule) {
    SCOPED_TRACE(rule);
    BackwardCase c({.b = 2, .sq = 33, .sk = 50, .h = 2, .hk = 1, .d = 8, .dv = 8});
    if (rule == 0) c.options.softcap = 2;
    if (rule == 1) c.with_slopes({2});
    if (rule == 2) c.with_sinks({1, 2});
    if (rule == 3) c.with_dlse();
    if (rule == 4) c.options.scale = -0.4;
    if (rule == 5) c.options.scale = 0;
    expect_right(c);
  }
}

TEST(CpuBackward, dropout) {
  for (const double p : {0.1, 0.5, 0.9}) {
    BackwardCase c({.b = 2, .sq = 45, .sk = 90, .h = 4, .hk = 2, .d = 16, .dv = 16});
    c.with_dropout(p).with_bias({1, 4, 1, 90}).with_dlse().with_sinks({0, 1, 2, 3});
    c.options.causal = Causal::bottom_right;
    c.options.origin = {3, 2, 1000, 13, 9};
    expect_right(c);
  }
}

TEST(CpuBackward, varlen_unused_rows_and_shift) {
  BackwardCase c(Attention::packed({.sq = 100, .sk = 140, .h = 4, .hk = 2, .d = 8, .dv = 16}));
  const Array cu_q = int32_array({0, 30, 30, 71}), cu_k = int32_array({0, 0, 50, 131});
  const Array used_q = int32_array({30, 0, 29}), used_k = int32_array({0, 50, 77}), shift = int32_array({0, 4, -6});
  c.options.cu_seqlens_q = cu_q;
  c.options.cu_seqlens_k = cu_k;
  c.options.seqused_q = used_q;
  c.options.seqused_k = used_k;
  c.options.shift = shift;
  c.options.causal = Causal::bottom_right;
  c.with_bias({1, 4, 50, 90}).with_slopes({3, 4});
  expect_right(c);
}

TEST(CpuBackward, each_gradient_alone) {
  BackwardCase c({.b = 2, .sq = 45, .sk = 90, .h = 4, .hk = 2, .d = 16, .dv = 24});
  c.with_bias({4, 1, 90}).with_slopes({4}).with_sinks({0, 1, 2, 3}).with_dropout(0.25);
  c.options.softcap = 3;
  c.forward_by_oracle();
  c.run();
  const std::vector<Array*> results = c.results();
  for (std::size_t alone = 0; alone < results.size(); ++alone) {
    std::vector<Array> all;
    for (const Array* array : results) all.push_back(*array);
    c.poison_results();
    Gradients one;
    Tensor* const places[] = {&one.dq, &one.dk, &one.dv, &one.dbias, &one.dslopes, &one.dsinks};
    *places[alone] = *results[alone];
    run_backward(c.backward_in(), one, c.options);
    for (std::size_t other = 0; other < results.size(); ++other) {
      if (other == alone)
        EXPECT_TRUE(results[other]->same_bits(all[other])) << alone;
      else
        EXPECT_TRUE(std::isnan(results[other]->values().front())) << alone << " wrote " << other;
    }
    for (std::size_t other = 0; other < results.size(); ++other) *results[other] = all[other];
  }
}

}  // namespace
}  // namespace narrows::test
