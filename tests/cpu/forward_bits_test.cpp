// A row's bits depend on its query, the keys and values that it sees and the options, on nothing else.
#include <gtest/gtest.h>

#include "tests/cpu/forward_run.hpp"

#include <array>

namespace narrows::test {
namespace {

/// The result of one call with features that reach every code path.
Attention rich_call(const Blocks& blocks, DType dtype = DType::fp32, bool rules = false) {
  static const Array slopes(DType::fp32, {4}, std::vector<double>{0.1, 0.2, 0.3, 0.4});
  Attention a({2, 57, 131, 4, 2, 24, 40}, dtype);
  a.options.causal = Causal::bottom_right;
  a.options.window.left = 90;
  if (rules) {
    a.options.alibi_slopes = slopes;
    a.options.softcap = 5;
  }
  run_forward(a, blocks);
  return a;
}

TEST(CpuForwardBits, do_not_depend_on_threads_blocks_or_waves) {
  for (const std::string& set : instruction_sets())
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp64})
      for (const bool rules : {false, true}) {
        const Attention one = rich_call({set, 1, 24, 32, 1}, dtype, rules);
        for (const Blocks& blocks : {Blocks{set, 2, 24, 32, 4}, Blocks{set, 3, 7, 32, 3}, Blocks{set, 2, 1, 32, 2},
                                     Blocks{set, 1, 500, 32, 100}}) {
          const Attention other = rich_call(blocks, dtype, rules);
          EXPECT_TRUE(one.o.same_bits(other.o) && one.lse.same_bits(other.lse))
              << set << " " << name(dtype) << " query block " << blocks.query_block;
        }
      }
}

TEST(CpuForwardBits, H22_do_not_depend_on_the_other_rows_or_the_batch) {
  const std::int64_t sq = 41, sk = 133;
  for (const std::string& set : instruction_sets()) {
    Attention whole({3, sq, sk, 4, 2, 20, 24});
    whole.options.causal = Causal::bottom_right;
    run_forward(whole, {set, 2, 24, 32, 2});
    for (const std::int64_t i : {0, 1, 17, 40}) {
      // Row i of batch row 1 alone, as a decoder would ask for it: its keys are the first sk - sq + i + 1.
      const std::int64_t keys = sk - sq + i + 1;
      Attention alone({1, 1, keys, 4, 2, 20, 24});
      alone.q.fill([&](const Dims& at) { return whole.q[{1, i, at[2], at[3]}]; });
      alone.k.fill([&](const Dims& at) { return whole.k[{1, at[1], at[2], at[3]}]; });
      alone.v.fill([&](const Dims& at) { return whole.v[{1, at[1], at[2], at[3]}]; });
      alone.options.causal = Causal::bottom_right;
      run_forward(alone, {set, 1, 24, 32, 2});
      alone.o.for_each([&](const Dims& at) {
        EXPECT_EQ(alone.o[at], (whole.o[{1, i, at[2], at[3]}])) << set << " row " << i;
      });
      for (std::int64_t h = 0; h < 4; ++h)
        EXPECT_EQ((alone.lse[{0, h, 0}]), (whole.lse[{1, h, i}])) << set << " row " << i;
    }
  }
}

TEST(CpuForwardBits, H22_a_nan_query_stays_in_its_row) {
  const Attention clean = rich_call({});
  Attention a({2, 57, 131, 4, 2, 24, 40});
  a.options = clean.options;
  a.q.set({1, 30, 2, 5}, kNaN);
  run_forward(a);
  a.o.for_each([&](const Dims& at) {
    const bool hit = at[0] == 1 && at[1] == 30 && at[2] == 2;
    EXPECT_TRUE(hit ? std::isnan(a.o[at]) : a.o[at] == clean.o[at]) << at[0] << " " << at[1] << " " << at[2];
  });
  EXPECT_TRUE(std::isnan(a.lse[{1, 2, 30}]));
}

TEST(CpuForwardBits, a_nan_key_or_value_reaches_the_rows_that_see_it) {
  for (const bool key : {true, false}) {
    Attention a({1, 9, 40, 2, 1, 8, 8});
    a.options.causal = Causal::bottom_right;
    (key ? a.k : a.v).set({0, 35, 0, 3}, kNaN);
    run_forward(a);
    for (std::int64_t i = 4; i < 9; ++i) EXPECT_TRUE(std::isnan(a.o[{0, i, 1, 3}])) << "p = " << 31 + i;
    EXPECT_EQ(std::isnan(a.lse[{0, 1, 4}]), key);
  }
}

/// What hides keys 3, 17..19 and all from 50 on from every row, and is not the lengths.
enum class Hidden { mask, broadcast_mask, bias, window };

class CpuForwardHidden : public testing::TestWithParam<Hidden> {};

TEST_P(CpuForwardHidden, keys_and_values_full_of_nan_change_nothing) {
  const auto hidden = [](std::int64_t j) { return j == 3 || (j >= 17 && j < 20) || j >= 50; };
  const auto outside = [](std::int64_t j) { return j < 20 || j >= 50; };
  const bool window = GetParam() == Hidden::window;
  Attention clean({2, 30, 70, 4, 2, 16, 16});
  const Dims shape = GetParam() == Hidden::mask ? Dims{2, 4, 30, 70} : Dims{1, 1, 1, 70};
  const Array mask = Array(DType::boolean, shape).fill([&](const Dims& at) { return hidden(at[3]) ? 0 : 1; });
  const Array bias = Array(DType::fp32, shape).fill([&](const Dims& at) {
    return hidden(at[3]) ? -std::numeric_limits<double>::infinity() : 0.5;
  });
  const Array shift = int32_array({20, 20});
  if (GetParam() == Hidden::bias) clean.options.bias = bias;
  if (GetParam() == Hidden::mask || GetParam() == Hidden::broadcast_mask) clean.options.mask = mask;
  if (window) {
    clean.options.window = {0, 0};
    clean.options.shift = shift;
  }
  Attention poisoned = clean;
  for (std::int64_t b = 0; b < 2; ++b)
    for (std::int64_t j = 0; j < 70; ++j)
      for (std::int64_t h = 0; h < 2; ++h)
        for (std::int64_t x = 0; x < 16 && (window ? outside(j) : hidden(j)); ++x) {
          poisoned.k.set({b, j, h, x}, kNaN);
          poisoned.v.set({b, j, h, x}, j % 2 ? kNaN : std::numeric_limits<double>::infinity());
        }
  run_forward(clean);
  run_forward(poisoned);
  EXPECT_FALSE(std::isnan(clean.o[{1, 29, 3, 15}]));
  EXPECT_TRUE(clean.o.same_bits(poisoned.o) && clean.lse.same_bits(poisoned.lse));
}

std::string hidden_name(const testing::TestParamInfo<Hidden>& info) {
  return std::array{"mask", "broadcast_mask", "bias", "window"}[static_cast<std::size_t>(info.param)];
}
INSTANTIATE_TEST_SUITE_P(All, CpuForwardHidden,
                         testing::Values(Hidden::mask, Hidden::broadcast_mask, Hidden::bias, Hidden::window),
                         hidden_name);

}  // namespace
}  // namespace narrows::test
