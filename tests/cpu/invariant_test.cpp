// batch_invariant: a row's bits depend on its query, the keys and values that it sees and the options.
#include <gtest/gtest.h>

#include "tests/cpu/forward_run.hpp"

namespace narrows::test {
namespace {

constexpr Sizes kSizes{3, 40, 1100, 8, 2, 32, 24};  // more keys than two tiles
constexpr std::int64_t kShift = kSizes.sk - kSizes.sq;

Attention whole_call(DType dtype = DType::fp32) {
  Attention a(kSizes, dtype);
  a.options.causal = Causal::bottom_right;
  a.options.batch_invariant = true;
  return a;
}

void call(Attention& a) {
  a.o.poison();
  a.lse.poison();
  forward(a.in(), a.out(), a.options);
}

void call_on(const std::string& set, Attention& a) {
  a.o.poison();
  a.lse.poison();
  run_planned(a, set);
}

/// Rows [first, first + sq) of one batch row of `whole`, over its first `sk` keys.
Attention part(const Attention& whole, std::int64_t b, std::int64_t first, std::int64_t sq, std::int64_t sk) {
  Attention a({1, sq, sk, kSizes.h, kSizes.hk, kSizes.d, kSizes.dv}, whole.q.dtype());
  a.options = whole.options;
  a.q.fill([&](const Dims& at) { return whole.q[{b, first + at[1], at[2], at[3]}]; });
  a.k.fill([&](const Dims& at) { return whole.k[{b, at[1], at[2], at[3]}]; });
  a.v.fill([&](const Dims& at) { return whole.v[{b, at[1], at[2], at[3]}]; });
  return a;
}

void expect_rows(const Attention& part, const Attention& whole, std::int64_t b, std::int64_t first, const char* what) {
  part.o.for_each([&](const Dims& at) { ASSERT_EQ(part.o[at], (whole.o[{b, first + at[1], at[2], at[3]}])) << what; });
  part.lse.for_each([&](const Dims& at) { ASSERT_EQ(part.lse[at], (whole.lse[{b, at[1], first + at[2]}])) << what; });
}

TEST(CpuInvariant, K05_K06_alone_in_a_batch_and_in_chunks) {
  std::vector<std::pair<DType, std::string>> kinds{{DType::fp32, ""}, {DType::fp64, ""}};
  for (const std::string& set : instruction_sets()) kinds.emplace_back(DType::bf16, set);
  for (const auto& [dtype, set] : kinds) {
    SCOPED_TRACE(std::string(name(dtype)) + " " + set);
    Attention whole = whole_call(dtype);
    call_on(set, whole);
    for (const std::int64_t b : {2, 0}) {
      if (b == 0 && repeats(2, 1) == 1) break;
      for (const auto& [first, rows] :
           {std::pair<std::int64_t, std::int64_t>{0, 1}, {39, 1}, {0, 40}, {7, 16}, {30, 10}}) {
        Attention chunk = part(whole, b, first, rows, kShift + first + rows);
        call_on(set, chunk);
        expect_rows(chunk, whole, b, first, "alone or in chunks");
      }
    }
  }
}

TEST(CpuInvariant, not_on_splits_or_threads) {
  Attention whole = whole_call();
  call(whole);
  for (const int splits : {1, 2, 7})
    for (const int threads : {1, 5}) {
      Attention other = whole;
      other.options.num_splits = splits;
      other.options.threads = threads;
      call(other);
      EXPECT_TRUE(other.o.same_bits(whole.o) && other.lse.same_bits(whole.lse)) << splits << " " << threads;
    }
}

TEST(CpuInvariant, not_on_the_page_size_or_the_form_of_the_keys) {
  Attention whole = whole_call();
  call(whole);
  const Array filled = int32_array({1100, 1100, 1100});
  Attention cache = whole;
  cache.options.cache_seqlens = filled;
  call(cache);
  EXPECT_TRUE(cache.o.same_bits(whole.o) && cache.lse.same_bits(whole.lse));
  for (const std::int64_t page : {1, 16, 256}) {
    const std::int64_t pages = (kSizes.sk + page - 1) / page;
    Attention paged = cache;
    Array table(DType::int32, {kSizes.b, pages});
    table.fill([&](const Dims& at) { return static_cast<double>((at[0] * pages + at[1]) * 7 % (kSizes.b * pages)); });
    const auto scatter = [&](const Array& from, std::int64_t width) {
      Array to(DType::fp32, {kSizes.b * pages, page, kSizes.hk, width});
      from.for_each([&](const Dims& at) {
        to.set({static_cast<std::int64_t>(table[{at[0], at[1] / page}]), at[1] % page, at[2], at[3]}, from[at]);
      });
      return to;
    };
    paged.k = scatter(whole.k, kSizes.d);
    paged.v = scatter(whole.v, kSizes.dv);
    paged.options.block_table = table;
    call(paged);
    EXPECT_TRUE(paged.o.same_bits(whole.o) && paged.lse.same_bits(whole.lse)) << page;
  }
}

/// Without batch_invariant the splits are the plan's, but still not the machine's.
TEST(CpuInvariant, splits_give_the_same_bits_on_any_number_of_threads) {
  Attention one({1, 1, 3000, 4, 2, 32, 32});
  one.options.threads = 1;
  call(one);
  Attention five = one;
  five.options.threads = 5;
  call(five);
  EXPECT_TRUE(five.o.same_bits(one.o) && five.lse.same_bits(one.lse));
}

}  // namespace
}  // namespace narrows::test
