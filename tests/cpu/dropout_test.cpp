// Dropout of the blocked forward: which weights it keeps, what it leaves alone.
#include <gtest/gtest.h>

#include "cpu/reference_philox.hpp"
#include "tests/cpu/forward_run.hpp"
#include "tests/support/check.hpp"

namespace narrows::test {
namespace {

/// Q = 0 and V = one-hot(j): O[i, j] is P(i, j) after dropout, 65536 / (n sk) or 0.
Attention probe(DType dtype = DType::fp32) {
  Attention a({2, 23, 67, 4, 2, 8, 67}, dtype);
  a.q.fill(0);
  a.v.fill_one_hot();
  return a;
}

void expect_the_oracle_s_mask(Attention& a, const Blocks& blocks) {
  run_forward(a, blocks);
  const reference::Dropout dropout(a.options, 4);
  a.o.for_each([&](const Dims& at) {
    const double factor = dropout.factor(at[0], at[2], at[1], at[3]);
    ASSERT_EQ(a.o[at] != 0, factor != 0) << to_text(at);
    ASSERT_NEAR(a.o[at], factor / 67, 1e-6 * factor) << to_text(at);
  });
  a.lse.for_each([&](const Dims& at) { ASSERT_NEAR(a.lse[at], std::log(67.0), 1e-6); });
}

TEST(CpuDropout, every_decision_is_the_oracle_s_in_every_tiling) {
  for (const std::string& set : instruction_sets())
    for (const double p : {0.1, 0.5, 0.9997})
      for (const Origin origin : {Origin{}, Origin{2, 3, 1000, 13, 40}, Origin{0, 0, 0, 8, 0}}) {
        Attention a = probe();
        a.options.dropout = p;
        a.options.seed = 0x123456789abcdef0ULL;
        a.options.offset = 77;
        a.options.origin = origin;
        expect_the_oracle_s_mask(a, {.instruction_set = set, .query_block = 5, .key_block = 32});
        expect_the_oracle_s_mask(a, {.instruction_set = set, .key_block = 16, .packs_ahead = false, .split_keys = 32});
      }
}

TEST(CpuDropout, I08_I10_seed_and_offset_are_read_when_the_call_runs) {
  Attention a = probe();
  Array seed(DType::int64, {1}, std::vector<double>{5}), offset(DType::int64, {1}, std::vector<double>{9});
  a.options.dropout = 0.5;
  a.options.seed = seed.tensor();
  a.options.offset = offset.tensor();
  forward(a.in(), a.out(), a.options);
  const Array first = a.o;
  seed.set({0}, 6);
  forward(a.in(), a.out(), a.options);
  EXPECT_FALSE(a.o.same_bits(first));
  Attention by_value = probe();
  by_value.options.dropout = 0.5;
  by_value.options.seed = 5;
  by_value.options.offset = 9;
  forward(by_value.in(), by_value.out(), by_value.options);
  EXPECT_TRUE(by_value.o.same_bits(first));
  offset.set({0}, -1);
  EXPECT_THROW(forward(a.in(), a.out(), a.options), Error);
}

TEST(CpuDropout, keeps_its_share) {
  Attention a({1, 400, 512, 1, 1, 4, 512});
  a.q.fill(0);
  a.v.fill_one_hot();
  for (const double p : {0.1, 0.48, 0.9}) {
    a.options.dropout = p;
    forward(a.in(), a.out(), a.options);
    double kept = 0;
    a.o.for_each([&](const Dims& at) { kept += a.o[at] != 0 ? 1 : 0; });
    const double n = 400 * 512, sigma = std::sqrt(p * (1 - p) / n);
    EXPECT_NEAR(kept / n, 1 - p, 5 * sigma) << p;
  }
}

TEST(CpuDropout, without_it_no_seed_matters) {
  Attention plain = probe(), seeded = probe();
  seeded.options.seed = 99;
  seeded.options.offset = 3;
  run_forward(plain);
  run_forward(seeded);
  EXPECT_TRUE(plain.o.same_bits(seeded.o) && plain.lse.same_bits(seeded.lse));
}

TEST(CpuDropout, agrees_with_the_oracle_beside_every_other_rule) {
  const Array slopes = Array(DType::fp32, {4}).fill(0.1), sinks = Array(DType::fp32, {4}).fill(1);
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16, DType::fp64}) {
    Attention a({2, 23, 67, 4, 2, 8, 9}, dtype);
    a.options.dropout = 0.3;
    a.options.seed = 4;
    a.options.causal = Causal::bottom_right;
    a.options.alibi_slopes = slopes;
    a.options.sinks = sinks;
    a.options.softcap = 2;
    run_forward(a);
    EXPECT_TRUE(forward_agrees(a.in(), a.out(), a.options)) << name(dtype);
  }
}

}  // namespace
}  // namespace narrows::test
