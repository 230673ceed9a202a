// The blocked forward against the oracle, over random calls.
#include <gtest/gtest.h>

#include "tests/cpu/dice.hpp"
#include "tests/cpu/forward_run.hpp"
#include "tests/support/check.hpp"
#include "tests/support/row_bounds.hpp"

namespace narrows::test {
namespace {

/// A call with its side arrays; nothing of it is a power of two by design.
struct RandomCall {
  Attention a;
  std::vector<Array> sides;
  Inputs in;
  Outputs out;
  Blocks blocks;
  Sizes sizes;
  bool varlen = false;

  explicit RandomCall(std::uint64_t seed) : dice(seed) {
    sides.reserve(16);
    choose_sizes();
    const std::vector<std::string> sets = instruction_sets();
    blocks.instruction_set = sets[dice.below(sets.size())];
    const DType dtype =
        type_for(blocks.instruction_set, dice.of({DType::fp32, DType::fp32, DType::bf16, DType::fp16, DType::fp64}));
    a = varlen ? Attention::packed(sizes, dtype, seed) : Attention(sizes, dtype, seed);
    arrange(dtype);
    choose_masks();
    choose_scores();
    choose_lengths();
    if (dice.one_in(3)) choose_bounds(seed);
    blocks.threads = static_cast<int>(dice.between(1, 3));
    blocks.query_block = dice.between(1, 40);
    blocks.key_block = dice.between(1, 80);
    blocks.heads_at_once = dice.between(1, 5);
    blocks.packs_ahead = !dice.one_in(3);
    if (dice.one_in(3)) blocks.split_keys = dice.between(1, 90);
    blocks.reads_in_place = dice.one_in(3);
  }

 private:
  void choose_sizes() {
    varlen = dice.one_in(4);
    sizes.hk = dice.between(1, 3);
    sizes.h = sizes.hk * dice.of<std::int64_t>({1, 1, 2, 3, 5});
    sizes.b = varlen ? 1 : dice.between(1, 3);
    sizes.sq = dice.of<std::int64_t>({1, 2, 7, 31, 50});
    sizes.sk = dice.of<std::int64_t>({1, 5, 33, 64, 97, 150});
    sizes.d = dice.of<std::int64_t>({1, 3, 8, 20, 40, 64, 80, 129});
    sizes.dv = dice.one_in(2) ? sizes.d : dice.of<std::int64_t>({1, 7, 16, 24, 33, 72});
  }

  Array rearranged(const Array& from) {
    const Dims& shape = from.shape();
    Arrangement arrangement;
    arrangement.gap = dice.between(0, 3);
    const bool dense = shape.rank() == 4, with_inner = shape.rank() == 3;
    if (dice.one_in(2)) arrangement.order = dense ? Dims{0, 2, 1, 3} : with_inner ? Dims{1, 0, 2} : Dims{1, 0};
    if (dice.one_in(5)) arrangement.order = dense ? Dims{3, 0, 1, 2} : with_inner ? Dims{2, 0, 1} : Dims{1, 0};
    Array to(from.dtype(), shape, arrangement);
    to.fill([&](const Dims& at) { return from.at(at); });
    return to;
  }

  void arrange(DType) {
    for (Array* array : {&a.q, &a.k, &a.v, &a.o, &a.lse}) *array = rearranged(*array);
    a.o.poison();
    a.lse.poison();
    in = a.in();
    out = a.out();
    for (Tensor* t : {&in.q, &in.k, &in.v}) {
      const std::size_t axis = dice.below(t->shape.rank());
      if (dice.one_in(4)) *t = reversed(*t, axis);
      if (dice.one_in(8)) *t = expanded(*t, dice.below(t->shape.rank()));
    }
    if (dice.one_in(4)) out.o = reversed(out.o, dice.below(out.o.shape.rank()));
    if (dice.one_in(6)) out.lse = {};
  }

  void choose_masks() {
    Options& options = a.options;
    options.causal = dice.of({Causal::none, Causal::bottom_right, Causal::bottom_right, Causal::top_left});
    if (dice.one_in(3)) options.window.left = dice.between(0, 70);
    if (dice.one_in(3)) options.window.right = dice.between(0, 70);
    if (dice.one_in(6)) options.chunk = dice.between(1, 60);
    if (dice.one_in(4))
      options.mask =
          side(Array(DType::boolean, broadcast_shape()).fill([&](const Dims&) { return dice.one_in(3) ? 0 : 1; }));
  }

  void choose_bounds(std::uint64_t seed) {
    const RandomBounds bounds(seed, a.q.shape(), sizes.sk);
    if (!dice.one_in(4)) a.options.key_begin = side(bounds.begin);
    if (!dice.one_in(4)) a.options.key_end = side(bounds.end);
    for (Tensor* t : {&a.options.key_begin, &a.options.key_end})
      if (t->given() && dice.one_in(4)) *t = dice.one_in(2) ? reversed(*t, 0) : expanded(*t, t->shape.rank() - 1);
  }

  void choose_scores() {
    Options& options = a.options;
    if (dice.one_in(4)) {
      options.dropout = dice.of({0.1, 0.5, 0.9});
      options.seed = dice.below(std::uint64_t{1} << 62);
      options.offset = dice.below(1000);
      options.origin = {dice.between(0, 3), dice.between(0, 3), dice.between(0, 100), dice.between(0, 100), 30};
    }
    if (dice.one_in(3)) options.scale = dice.of({0.0, -0.3, 1.0, 2.5, 0.01});
    if (dice.one_in(5)) options.softcap = dice.of({1.0, 30.0});
    if (dice.one_in(4)) {
      const Dims shape = dice.one_in(2) && !varlen ? Dims{sizes.b, sizes.h} : Dims{sizes.h};
      options.alibi_slopes =
          side(Array(dice.of({DType::fp32, DType::bf16}), shape).fill([&](const Dims&) { return dice.uniform(); }));
    }
    if (dice.one_in(4))
      options.bias = side(
          Array(dice.of({DType::fp32, DType::bf16, DType::fp16, DType::fp64}), broadcast_shape())
              .fill([&](const Dims&) { return dice.one_in(9) ? -std::numeric_limits<double>::infinity() : dice(); }));
    if (dice.one_in(4))
      options.sinks = side(Array(DType::fp32, {sizes.h}).fill([&](const Dims&) {
        return dice.one_in(4) ? -std::numeric_limits<double>::infinity() : 2 * dice();
      }));
  }

  void choose_lengths() {
    Options& options = a.options;
    const std::int64_t sequences = varlen ? dice.between(1, 4) : sizes.b;
    std::vector<double> used_q, used_k, shifts;
    if (varlen) {
      const std::vector<double> q = bounds(sequences, sizes.sq), k = bounds(sequences, sizes.sk);
      options.cu_seqlens_q = side(int32_array(q));
      options.cu_seqlens_k = side(int32_array(k));
      for (std::size_t s = 0; s + 1 < q.size(); ++s) {
        used_q.push_back(static_cast<double>(dice.between(0, static_cast<std::int64_t>(q[s + 1] - q[s]))));
        used_k.push_back(static_cast<double>(dice.between(0, static_cast<std::int64_t>(k[s + 1] - k[s]))));
      }
    } else {
      for (std::int64_t s = 0; s < sequences; ++s) {
        used_q.push_back(static_cast<double>(dice.between(0, sizes.sq)));
        used_k.push_back(static_cast<double>(dice.between(0, sizes.sk)));
      }
    }
    for (std::int64_t s = 0; s < sequences; ++s) shifts.push_back(static_cast<double>(dice.between(-20, 80)));
    if (dice.one_in(4)) options.seqused_q = side(int32_array(used_q));
    if (dice.one_in(4)) options.seqused_k = side(int32_array(used_k));
    if (options.causal != Causal::top_left && dice.one_in(6)) options.shift = side(int32_array(shifts));
  }

  std::vector<double> bounds(std::int64_t sequences, std::int64_t total) {
    std::vector<double> values{0};
    for (std::int64_t s = 0; s < sequences; ++s)
      values.push_back(static_cast<double>(dice.between(static_cast<std::int64_t>(values.back()), total)));
    return values;
  }

  Dims broadcast_shape() {
    const auto size = [&](std::int64_t full) { return dice.one_in(3) ? 1 : full; };
    return varlen ? Dims{1, size(sizes.h), sizes.sq, sizes.sk}
                  : Dims{size(sizes.b), size(sizes.h), size(sizes.sq), size(sizes.sk)};
  }

  Tensor side(const Array& array) {
    sides.push_back(array);
    return sides.back();
  }

  Dice dice;
};

// Seeds are split over several tests so that a failure names its part and each stays short.
class CpuForwardRandom : public testing::TestWithParam<int> {};

TEST_P(CpuForwardRandom, agrees_with_the_oracle) {
  for (int round = 0; round < repeats(60, 6); ++round) {
    const std::uint64_t seed = static_cast<std::uint64_t>(GetParam()) * 1000 + static_cast<std::uint64_t>(round);
    RandomCall call(seed);
    run_forward(call.in, call.out, call.a.options, call.blocks);
    EXPECT_TRUE(forward_agrees(call.in, call.out, call.a.options))
        << "seed " << seed << ": " << make_forward(call.in, call.out, call.a.options).problem.text();
    EXPECT_TRUE(call.a.o.gaps_intact() && call.a.lse.gaps_intact()) << "seed " << seed;
  }
}
INSTANTIATE_TEST_SUITE_P(Seeds, CpuForwardRandom, testing::Range(0, 10));

class CpuForwardDtypes : public testing::TestWithParam<DType> {};

TEST_P(CpuForwardDtypes, plain_and_causal_with_the_plan_s_own_blocks) {
  for (const Causal causal : {Causal::none, Causal::bottom_right})
    for (const std::string& set : instruction_sets()) {
      Attention a({1, repeats(203, 61), repeats(611, 190), 2, 1, 64, 64}, GetParam());
      a.options.causal = causal;
      run_forward(a, {set, 2, repeats(192, 48), repeats(512, 128), 2});
      EXPECT_TRUE(forward_agrees(a.in(), a.out(), a.options)) << set;
    }
}

TEST_P(CpuForwardDtypes, F05_structured_values_and_every_head_dim) {
  std::vector<std::string> sets{""};
  if (GetParam() == DType::bf16) sets = bf16_sets();
  for (const std::string& set : sets)
    for (const std::int64_t d : {1, 2, 15, 17, 72, 96, 136, 160, 176, 255, 256, 257, 384, 512}) {
      Attention a({1, 13, 37, 2, 2, d, d == 72 ? 512 : d}, GetParam());
      a.q.fill_structured(0.1);
      a.k.fill_structured(0.7);
      a.v.fill_structured(1.3);
      run_forward(a, {.instruction_set = set});
      EXPECT_TRUE(forward_agrees(a.in(), a.out(), a.options)) << set << " d " << d;
    }
}
INSTANTIATE_TEST_SUITE_P(All, CpuForwardDtypes, testing::Values(DType::fp32, DType::bf16, DType::fp16, DType::fp64),
                         [](const auto& param) { return std::string(name(param.param)); });

TEST(CpuForward, F08_every_ratio_of_heads) {
  for (const std::int64_t group : {1, 3, 5, 6, 7, 16}) {
    Attention a({2, 9, 40, 4 * group, 4, 16, 16});
    a.options.causal = Causal::bottom_right;
    run_forward(a);
    EXPECT_TRUE(forward_agrees(a.in(), a.out(), a.options)) << group;
  }
}

TEST(CpuForward, C06_C14_zero_sizes_are_ordinary) {
  for (const Causal causal : {Causal::none, Causal::bottom_right}) {
    Attention no_keys({2, 3, 0, 2, 1, 8, 8});
    no_keys.options.causal = causal;
    run_forward(no_keys);
    no_keys.o.for_each([&](const Dims& at) { EXPECT_EQ(no_keys.o[at], 0); });
    no_keys.lse.for_each([&](const Dims& at) { EXPECT_EQ(no_keys.lse[at], -std::numeric_limits<double>::infinity()); });
    Attention no_queries({2, 0, 3, 2, 1, 8, 8}), no_batch({0, 3, 3, 2, 1, 8, 8});
    run_forward(no_queries);
    run_forward(no_batch);
  }
}

TEST(CpuForward, A16_sinks_of_empty_rows_and_large_sinks) {
  Attention a({1, 2, 3, 2, 2, 8, 8});
  Array sinks(DType::fp32, {2}, std::vector<double>{0.5, 100}), used = int32_array({0});
  a.options.sinks = sinks;
  run_forward(a);
  EXPECT_TRUE(forward_agrees(a.in(), a.out(), a.options));
  EXPECT_NEAR((a.lse[{0, 1, 0}]), 100, 1e-4);
  a.options.seqused_k = used;
  run_forward(a);
  EXPECT_EQ((a.lse[{0, 0, 1}]), 0.5);
  EXPECT_EQ((a.lse[{0, 1, 1}]), 100);
  EXPECT_EQ((a.o[{0, 1, 0, 3}]), 0);
}

}  // namespace
}  // namespace narrows::test
