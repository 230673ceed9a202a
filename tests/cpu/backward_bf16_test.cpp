// The blocked backward on the sets that multiply bf16, against the oracle.
#include "tests/cpu/backward_run.hpp"

#include <limits>

namespace narrows::test {
namespace {

class CpuBackwardBf16 : public testing::TestWithParam<std::string> {
 protected:
  static void expect_right(BackwardCase& c, BackwardBlocks blocks = {}) {
    blocks.instruction_set = GetParam();
    const InstructionSets sets(GetParam());
    const Call call = make_backward(c.backward_in(), c.wanted(), c.options);
    EXPECT_EQ(sets.executing(choose(call.problem, work(call), sets.machine(), "cpu").plan.instruction_set), GetParam());
    c.forward_by_oracle();
    c.run(blocks);
    EXPECT_TRUE(c.agrees());
  }
};

TEST_P(CpuBackwardBf16, masks) {
  struct Rule {
    Causal causal;
    Window window;
    std::int64_t chunk;
  };
  for (const Rule& rule : {Rule{Causal::none, {}, 0}, Rule{Causal::top_left, {}, 0}, Rule{Causal::none, {9, 3}, 0},
                           Rule{Causal::bottom_right, {40, -1}, 0}, Rule{Causal::bottom_right, {}, 17}})
    for (const auto& [sq, sk] : {std::pair{61, 150}, std::pair{150, 61}, std::pair{1, 97}, std::pair{97, 1}}) {
      SCOPED_TRACE(testing::Message() << "window " << rule.window.left << " " << rule.window.right << " chunk "
                                      << rule.chunk << " sq " << sq << " sk " << sk);
      BackwardCase c({.b = 1, .sq = sq, .sk = sk, .h = 3, .hk = 1, .d = 16, .dv = 24}, DType::bf16);
      c.options.causal = rule.causal;
      c.options.window = rule.window;
      c.options.chunk = rule.chunk;
      expect_right(c);
    }
}

TEST_P(CpuBackwardBf16, every_head_dim) {
  for (const auto& [d, dv] : {std::pair{16, 16}, std::pair{17, 19}, std::pair{31, 33}, std::pair{64, 16},
                              std::pair{80, 48}, std::pair{129, 256}, std::pair{256, 17}}) {
    SCOPED_TRACE(testing::Message() << "d " << d << " dv " << dv);
    BackwardCase c({.b = 1, .sq = 45, .sk = 83, .h = 2, .hk = 1, .d = d, .dv = dv}, DType::bf16);
    c.options.causal = Causal::bottom_right;
    expect_right(c);
  }
}

TEST_P(CpuBackwardBf16, blocks_of_the_plan) {
  for (const Causal causal : {Causal::none, Causal::bottom_right}) {
    BackwardCase c({.b = 1, .sq = 203, .sk = 331, .h = 2, .hk = 1, .d = 64, .dv = 64}, DType::bf16);
    c.options.causal = causal;
    expect_right(c, {.query_block = 96, .key_block = 128, .key_chunk = 512});
  }
}

TEST_P(CpuBackwardBf16, mask_softcap_slopes_sinks_bias_dlse_and_dropout) {
  for (const double dropout : {0.0, 0.3}) {
    BackwardCase c({.b = 2, .sq = 45, .sk = 90, .h = 4, .hk = 2, .d = 16, .dv = 16}, DType::bf16);
    c.with_bias({4, 1, 90}).with_slopes({2, 4}).with_dlse();
    c.with_sinks({0.5, -1, -std::numeric_limits<double>::infinity(), 3});
    if (dropout > 0) c.with_dropout(dropout);
    c.mask = Array(DType::boolean, {2, 1, 45, 90});
    Gaussian random(3);
    c.mask.fill([&](const Dims& at) { return at[2] != 7 && random.uniform() < 0.5 ? 1.0 : 0.0; });
    c.options.mask = c.mask;
    c.options.softcap = 1.5;
    c.options.causal = Causal::bottom_right;
    expect_right(c);
    EXPECT_EQ(c.dsinks.at({2}), 0);
    for (std::int64_t x = 0; x < 16; ++x) EXPECT_EQ(c.dq.at({1, 7, 1, x}), 0);
  }
}

TEST_P(CpuBackwardBf16, scales_of_any_sign) {
  for (const double scale : {-0.4, 0.0, 2.5}) {
    SCOPED_TRACE(scale);
    BackwardCase c({.b = 2, .sq = 33, .sk = 50, .h = 2, .hk = 1, .d = 19, .dv = 17}, DType::bf16);
    c.options.scale = scale;
    expect_right(c);
  }
}

TEST_P(CpuBackwardBf16, varlen_unused_rows_and_shift) {
  BackwardCase c(Attention::packed({.sq = 100, .sk = 140, .h = 4, .hk = 2, .d = 24, .dv = 16}, DType::bf16));
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

/// NaN in rows of dO and Q that see no key, and in keys that no row sees, reaches nothing.
TEST_P(CpuBackwardBf16, hidden_nan_reaches_nothing) {
  const auto hidden_row = [](std::int64_t i) { return i == 4 || i >= 40; };
  const auto hidden_key = [](std::int64_t j) { return j == 3 || j >= 60; };
  BackwardCase c({.b = 1, .sq = 45, .sk = 70, .h = 2, .hk = 1, .d = 16, .dv = 16}, DType::bf16);
  c.mask = Array(DType::boolean, {1, 1, 45, 70}).fill([&](const Dims& at) {
    return hidden_row(at[2]) || hidden_key(at[3]) ? 0 : 1;
  });
  c.options.mask = c.mask;
  expect_right(c);
  const Array dq = c.dq, dk = c.dk, dv = c.dv;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (Array* array : {&c.q, &c.k, &c.v, &c.dout})
    array->for_each([&](const Dims& at) {
      const bool row = array == &c.q || array == &c.dout;
      if (row ? hidden_row(at[1]) : hidden_key(at[1])) array->set(at, nan);
    });
  c.run({.instruction_set = GetParam()});
  EXPECT_TRUE(c.dq.same_bits(dq) && c.dk.same_bits(dk) && c.dv.same_bits(dv));
}

INSTANTIATE_TEST_SUITE_P(Sets, CpuBackwardBf16, testing::ValuesIn(bf16_sets()),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace narrows::test
