// Few query rows read K and V where they lie: the path against the oracle, and its bits.
#include <gtest/gtest.h>

#include "tests/cpu/dice.hpp"
#include "tests/cpu/forward_run.hpp"
#include "tests/support/check.hpp"

#include <array>
#include <cmath>
#include <limits>
#include <numeric>

namespace narrows::test {
namespace {

Blocks in_place(std::string set = {}, i64 split_keys = 0, i64 heads_together = 3) {
  return {.instruction_set = std::move(set),
          .query_block = 200,
          .key_block = 64,
          .split_keys = split_keys,
          .reads_in_place = true,
          .heads_together = heads_together};
}

TEST(CpuDecode, odd_head_dims_and_groups_on_every_instruction_set) {
  Dice dice(21);
  for (const std::string& set : instruction_sets())
    for (const std::int64_t group : {1, 3, 4, 8, 128})
      for (int round = 0; round < repeats(6, 2); ++round) {
        const std::int64_t d = dice.between(1, 80), dv = dice.between(1, 80), hk = group == 128 ? 1 : 2;
        const DType dtype = dice.of({DType::fp32, DType::bf16, DType::fp16, DType::fp64});
        Attention a({2, dice.between(1, 3), dice.between(1, repeats(300, 90)), hk * group, hk, d, dv}, dtype,
                    dice.below(100));
        a.options.causal = dice.one_in(2) ? Causal::bottom_right : Causal::none;
        run_forward(a, in_place(set, dice.one_in(2) ? 64 : 0));
        EXPECT_TRUE(forward_agrees(a.in(), a.out(), a.options)) << set << " group " << group << " " << d << " " << dv;
      }
}

TEST(CpuDecode, latent_attention_576_by_512) {
  for (const DType dtype : {DType::bf16, DType::fp32}) {
    Attention a({1, 1, 90, 16, 1, 576, 512}, dtype);
    run_forward(a, in_place());
    EXPECT_TRUE(forward_agrees(a.in(), a.out(), a.options));
  }
}

/// A copy of a (b, s, hk, d) array in pages in an order of their own.
struct Pages {
  Array pool, table;

  Pages(const Array& whole, std::int64_t page, Array order) : table(std::move(order)) {
    const Dims& shape = whole.shape();
    const std::int64_t each = table.shape()[1];
    pool = Array(whole.dtype(), {shape[0] * each, page, shape[2], shape[3]}).fill(kNaN);
    whole.for_each([&](const Dims& at) {
      const auto entry = static_cast<std::int64_t>(table[{at[0], at[1] / page}]);
      pool.set({entry, at[1] % page, at[2], at[3]}, whole[at]);
    });
  }
};

Array heads_outside(const Array& whole) {
  const Arrangement arrangement{.order = {0, 2, 1, 3}};
  return Array(whole.dtype(), whole.shape(), arrangement).fill([&](const Dims& at) { return whole[at]; });
}

TEST(CpuDecode, heads_together_give_the_bits_of_each_alone_in_every_layout) {
  constexpr std::int64_t kKeys = 141, kPage = 11, kPages = 13;
  for (const std::int64_t hk : {1, 3, 8, 11})
    for (const DType dtype : {DType::fp32, DType::bf16})
      for (const i64 split : {0, 64}) {
        Attention alone({2, 2, kKeys, 2 * hk, hk, 32, 16}, dtype, static_cast<std::uint64_t>(hk));
        alone.options.causal = Causal::bottom_right;
        const Array filled = int32_array({141, 90});
        alone.options.cache_seqlens = filled;
        run_forward(alone, in_place({}, split, 1));
        EXPECT_TRUE(forward_agrees(alone.in(), alone.out(), alone.options)) << hk;
        const Array order = Array(DType::int32, {2, kPages}).fill([](const Dims& at) {
          return static_cast<double>((at[0] * kPages + at[1]) * 7 % (2 * kPages));
        });
        const Pages k(alone.k, kPage, order), v(alone.v, kPage, order);
        for (const i64 together : {2, 5, 8})
          for (const i64 at_once : {7, 50}) {
            Blocks blocks = in_place({}, split, together);
            Attention same = alone, apart = alone, paged = alone;
            apart.k = heads_outside(alone.k);
            apart.v = heads_outside(alone.v);
            paged.k = k.pool;
            paged.v = v.pool;
            paged.options.block_table = order;
            for (Attention* a : {&same, &apart, &paged}) {
              a->o.poison();
              a->lse.poison();
              run_forward(*a, blocks);
              EXPECT_TRUE(same_results(alone, *a)) << hk << " together " << together << " at once " << at_once;
            }
          }
      }
}

/// The plan's own choice on both sides of its bound, and each path forced where the plan takes the other.
TEST(CpuDecode, both_paths_agree_with_the_oracle_around_the_bound) {
  for (const std::int64_t sq : {1, 2, 3, 4, 5, 8, 9, 16}) {
    Attention a({repeats(2, 1), sq, 700, 8, 2, 64, 64}, DType::bf16);
    a.options.causal = Causal::bottom_right;
    forward(a.in(), a.out(), a.options);
    EXPECT_TRUE(forward_agrees(a.in(), a.out(), a.options)) << sq << " as planned";
    for (const bool chosen : {true, false}) {
      a.o.poison();
      a.lse.poison();
      run_forward(a, {.query_block = 200, .key_block = 256, .packs_ahead = false, .reads_in_place = chosen});
      EXPECT_TRUE(forward_agrees(a.in(), a.out(), a.options)) << sq << (chosen ? " in place" : " packed");
    }
  }
}

TEST(CpuDecode, pages_of_any_size_give_the_bits_of_a_contiguous_cache) {
  for (const std::int64_t page : {1, 3, 16, 256})
    for (const std::int64_t group : {1, 4})
      for (const DType dtype : {DType::fp32, DType::bf16}) {
        Attention whole({2, 2, 333, 2 * group, 2, 32, 48}, dtype);
        const Array filled = int32_array({333, 100}), pad = int32_array({0, 5});
        whole.options.cache_seqlens = filled;
        whole.options.leftpad = pad;
        whole.options.causal = Causal::bottom_right;
        const std::int64_t pages = (333 + page - 1) / page, pool = 2 * pages + 3;
        Attention paged = whole;
        paged.k = Array(dtype, {pool, page, 2, 32}).fill(kNaN);
        paged.v = Array(dtype, {pool, page, 2, 48}).fill(kNaN);
        Array table(DType::int32, {2, pages});
        std::vector<std::int64_t> order(static_cast<std::size_t>(pool));
        std::iota(order.begin(), order.end(), 0);
        Dice dice(3);
        for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[dice.below(i)]);
        for (std::int64_t b = 0; b < 2; ++b)
          for (std::int64_t slot = 0; slot < 333; ++slot) {
            const std::int64_t entry = order[static_cast<std::size_t>(b * pages + slot / page)];
            const bool used = b == 0 || (slot >= 5 && slot < 100);
            table.set({b, slot / page}, b == 0 || slot / page * page < 100 ? static_cast<double>(entry) : -9);
            for (std::int64_t h = 0; h < 2; ++h) {
              for (std::int64_t x = 0; x < 32 && used; ++x)
                paged.k.set({entry, slot % page, h, x}, whole.k[{b, slot, h, x}]);
              for (std::int64_t x = 0; x < 48 && used; ++x)
                paged.v.set({entry, slot % page, h, x}, whole.v[{b, slot, h, x}]);
            }
          }
        paged.options.block_table = table;
        for (Attention* a : {&whole, &paged}) run_forward(*a, in_place());
        EXPECT_TRUE(same_results(whole, paged)) << page;
        EXPECT_TRUE(forward_agrees(paged.in(), paged.out(), paged.options)) << page;
      }
}

TEST(CpuDecode, every_rule) {
  const Sizes sizes{2, 3, 150, 8, 2, 40, 24};
  const Array slopes(DType::fp32, {8}, std::vector<double>{1, .5, .25, .1, .05, 0, 2, .3});
  const Array sinks = Array(DType::fp32, {8}).fill(0.4);
  const Array bias = Array(DType::bf16, {1, 8, 3, 150}).fill_gaussian(2);
  const Array mask = Array(DType::boolean, {2, 1, 3, 150}).fill([](const Dims& at) {
    return (at[0] + 3 * at[2] + at[3]) % 5 < 3 ? 1 : 0;
  });
  std::vector<Options> rules(8);
  rules[1].softcap = 2;
  rules[2].alibi_slopes = slopes;
  rules[3].bias = bias;
  rules[4].mask = mask;
  rules[5].sinks = sinks;
  rules[5].window = {17, 4};
  rules[6].chunk = 37;
  rules[6].scale = -0.3;
  rules[7].dropout = 0.25;
  rules[7].seed = 9;
  const int step = repeats(1, 3);  // shares no factor with a loop
  int number = 0;
  for (const std::string& set : instruction_sets())
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16, DType::fp64})
      for (std::size_t rule = 0; rule < rules.size(); ++rule)
        for (const i64 split : {0, 64}) {
          if (number++ % step != 0) continue;
          Attention a(sizes, dtype);
          a.options = rules[rule];
          a.options.causal = rule % 2 ? Causal::bottom_right : Causal::none;
          run_forward(a, in_place(set, split));
          EXPECT_TRUE(forward_agrees(a.in(), a.out(), a.options)) << set << " rule " << rule << " split " << split;
        }
}

TEST(CpuDecode, hidden_keys_full_of_nan_change_nothing) {
  enum Rule { masked, biased, bounded };
  const auto hidden = [](std::int64_t j) { return j <= 3 || (j >= 60 && j < 75) || j >= 99; };
  const Array mask = Array(DType::boolean, {1, 1, 1, 110}).fill([&](const Dims& at) { return hidden(at[3]) ? 0 : 1; });
  const Array bias = Array(DType::fp32, {1, 1, 1, 110}).fill([&](const Dims& at) {
    return hidden(at[3]) ? -std::numeric_limits<double>::infinity() : 0.5;
  });
  std::array<std::int32_t, 2> begins{4, 75}, ends{60, 99};
  for (const Rule rule : {masked, biased, bounded})
    for (const std::int64_t d : {32, 20}) {
      Attention clean({1, 2, 110, 4, 2, d, d});
      if (rule == masked) clean.options.mask = mask;
      if (rule == biased) clean.options.bias = bias;
      if (rule == bounded) {
        clean.options.key_begin = view(begins.data(), {1, 2});
        clean.options.key_end = view(ends.data(), {1, 2});
      }
      Attention poisoned = clean;
      for (Array* array : {&poisoned.k, &poisoned.v})
        array->for_each([&](const Dims& at) {
          if (hidden(at[1])) array->set(at, at[1] % 2 ? kNaN : std::numeric_limits<double>::infinity());
        });
      run_forward(clean, in_place({}, 0, 1));
      run_forward(poisoned, in_place({}, 0, 2));
      EXPECT_TRUE(forward_agrees(clean.in(), clean.out(), clean.options));
      EXPECT_TRUE(same_results(clean, poisoned)) << rule << " " << d;
    }
}

TEST(CpuDecode, a_nan_value_reaches_the_rows_that_see_it_also_with_a_weight_of_zero) {
  const Array mask = Array(DType::boolean, {1, 1, 1, 40}).fill([](const Dims& at) { return at[3] == 7 ? 0 : 1; });
  Attention a({1, 1, 40, 4, 1, 16, 16});
  a.q.fill(1);
  a.k.fill([](const Dims& at) { return at[1] == 20 ? -100 : 1; });  // exp2 gives key 20 a weight of 0
  a.v.set({0, 20, 0, 2}, kNaN);
  a.options.mask = mask;
  run_forward(a, in_place());
  for (std::int64_t h = 0; h < 4; ++h) {
    EXPECT_TRUE(std::isnan(a.o[{0, 0, h, 2}]));
    EXPECT_FALSE(std::isnan(a.o[{0, 0, h, 3}]));
  }
}

TEST(CpuDecode, a_nan_query_stays_in_its_row) {
  Attention clean({1, 2, 77, 6, 1, 24, 24}), spoiled = clean;
  spoiled.q.set({0, 1, 4, 5}, kNaN);
  for (Attention* a : {&clean, &spoiled}) run_forward(*a, in_place());
  spoiled.o.for_each([&](const Dims& at) {
    const bool hit = at[1] == 1 && at[2] == 4;
    EXPECT_TRUE(hit ? std::isnan(spoiled.o[at]) : spoiled.o[at] == clean.o[at]) << at[1] << " " << at[2];
  });
}

TEST(CpuDecode, bits_do_not_depend_on_threads_with_heads_together) {
  Attention one({3, 1, 500, 16, 8, 64, 64}, DType::bf16);
  Blocks blocks = in_place({}, 128, 1);
  blocks.threads = 1;
  run_forward(one, blocks);
  EXPECT_TRUE(forward_agrees(one.in(), one.out(), one.options));
  blocks.heads_at_once = 24;
  for (blocks.threads = 1; blocks.threads <= 5; ++blocks.threads)
    for (const i64 together : {1, 3, 8}) {
      Attention more = one;
      more.o.poison();
      more.lse.poison();
      blocks.heads_together = together;
      run_forward(more, blocks);
      EXPECT_TRUE(same_results(one, more)) << blocks.threads << " threads, " << together << " together";
    }
}

TEST(CpuDecode, bits_do_not_depend_on_threads_or_on_other_rows) {
  Attention one({2, 3, 900, 8, 2, 64, 64});
  one.options.causal = Causal::bottom_right;
  one.options.threads = 1;
  forward(one.in(), one.out(), one.options);
  for (int threads = 2; threads <= 5; ++threads) {
    Attention more = one;
    more.options.threads = threads;
    forward(more.in(), more.out(), more.options);
    EXPECT_TRUE(same_results(one, more)) << threads;
  }
  Attention last({2, 1, 900, 8, 2, 64, 64});
  last.q.fill([&](const Dims& at) { return one.q[{at[0], 2, at[2], at[3]}]; });
  last.k = one.k;
  last.v = one.v;
  forward(last.in(), last.out(), last.options);
  last.o.for_each([&](const Dims& at) { ASSERT_EQ(last.o[at], (one.o[{at[0], 2, at[2], at[3]}])); });
}

}  // namespace
}  // namespace narrows::test
