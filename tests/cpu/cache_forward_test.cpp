// KV caches: random calls against the oracle, and what other libraries got wrong.
#include <gtest/gtest.h>

#include "cpu/reference.hpp"
#include "tests/cpu/cache_call.hpp"
#include "tests/support/check.hpp"

#include <sys/mman.h>
#include <utility>

namespace narrows::test {
namespace {

/// The oracle appends to copies; what is rotated may differ by rounding, all else must be the same.
void expect_same_cache(const Array& ours, const Array& exact, std::uint64_t seed) {
  const double tolerance = ours.dtype() == DType::bf16 ? 0x1p-7 : ours.dtype() == DType::fp16 ? 0x1p-10 : 1e-5;
  int reported = 0;
  ours.for_each([&](const Dims& at) {
    const double a = ours[at], b = exact[at];
    const bool same = std::isnan(b) ? std::isnan(a) : std::abs(a - b) <= tolerance * std::max(1.0, std::abs(b));
    if (!same && reported++ < 3) ADD_FAILURE() << "seed " << seed << " " << to_text(at) << ": " << a << ", not " << b;
  });
  EXPECT_TRUE(ours.gaps_intact()) << "seed " << seed;
}

class CpuCacheRandom : public testing::TestWithParam<int> {};

TEST_P(CpuCacheRandom, agrees_with_the_oracle) {
  for (int round = 0; round < repeats(60, 8); ++round) {
    const std::uint64_t seed = static_cast<std::uint64_t>(GetParam()) * 1000 + static_cast<std::uint64_t>(round);
    CacheCall call(seed);
    Attention& a = call.a;
    Array k = a.k, v = a.v, o = a.o;
    reference::forward({a.q, k, v}, {o, {}}, a.options);
    const Array q = a.q;
    run_forward(a, call.blocks);
    EXPECT_TRUE(forward_agrees(a.in(), a.out(), a.options))
        << "seed " << seed << ": " << make_forward(a.in(), a.out(), a.options).problem.text();
    expect_same_cache(a.k, k, seed);
    expect_same_cache(a.v, v, seed);
    EXPECT_TRUE(a.o.gaps_intact() && a.q.same_bits(q)) << "seed " << seed;
  }
}

TEST_P(CpuCacheRandom, counting_shows_exactly_the_visible_keys) {
  for (int round = 0; round < repeats(60, 8); ++round) {
    const std::uint64_t seed = static_cast<std::uint64_t>(GetParam()) * 1000 + static_cast<std::uint64_t>(round);
    CacheCall call(seed, true);
    Attention& a = call.a;
    const reference::ForwardResult exact = reference::exact_forward(a.in(), a.options);
    run_forward(a, call.blocks);
    const std::vector<double> lse = a.lse.values(), o = a.o.values();
    const bool varlen = a.q.shape().rank() == 3;
    const std::int64_t h = a.q.shape()[varlen ? 1 : 2], sq = a.q.shape()[varlen ? 0 : 1];
    const std::size_t dv = static_cast<std::size_t>(a.o.shape()[a.o.shape().rank() - 1]);
    for (std::size_t element = 0; element < lse.size(); ++element) {
      const double keys = std::round(std::exp(exact.lse.value[element]));
      ASSERT_EQ(std::round(std::exp(lse[element])), keys) << "seed " << seed << " LSE element " << element;
      const std::int64_t e = static_cast<std::int64_t>(element), i = e % sq, head = e / sq % h, b = e / sq / h;
      const std::size_t first = static_cast<std::size_t>((b * sq + i) * h + head) * dv;
      for (std::size_t c = first; c < first + dv; ++c)
        ASSERT_EQ(std::round(o[c] * keys), std::round(exact.o.value[c] * keys))
            << "seed " << seed << " O element " << c;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Seeds, CpuCacheRandom, testing::Range(0, 8));

/// One batch of decoding or prefill over a cache, contiguous and in pages of a size, with the same keys.
struct TwoCaches {
  Attention whole;  // (b, capacity, hk, *)
  Array page_k, page_v, table, filled;
  std::int64_t page;

  TwoCaches(const Sizes& s, std::int64_t page_size, const std::vector<double>& lengths, DType dtype = DType::fp32)
      : whole(s, dtype), filled(int32_array(lengths)), page(page_size) {
    const std::int64_t pages = (s.sk + page - 1) / page + 1;  // one more than needed
    page_k = Array(dtype, {s.b * pages + 3, page, s.hk, s.d});
    page_v = Array(dtype, {s.b * pages + 3, page, s.hk, s.dv});
    table = Array(DType::int32, {s.b, pages});
    std::int64_t next = s.b * pages + 2;
    for (std::int64_t b = 0; b < s.b; ++b)
      for (std::int64_t slot = 0; slot < s.sk; ++slot) {
        const bool used = static_cast<double>(slot) < lengths[static_cast<std::size_t>(b)];
        if (used && slot % page == 0) table.set({b, slot / page}, static_cast<double>(next--));
        const std::int64_t at = used ? static_cast<std::int64_t>(table[{b, slot / page}]) : 0;
        for (std::int64_t h = 0; h < s.hk; ++h) {
          move(whole.k, {b, slot, h, 0}, page_k, {at, slot % page, h, 0}, used);
          move(whole.v, {b, slot, h, 0}, page_v, {at, slot % page, h, 0}, used);
        }
      }
    whole.options.cache_seqlens = filled;
  }

  /// Copies a used row; poisons one that is not.
  static void move(Array& from, Dims source, Array& to, Dims target, bool used) {
    for (std::int64_t x = 0; x < from.shape()[3]; ++x) {
      source[3] = target[3] = x;
      if (used)
        to.set(target, from[source]);
      else
        from.set(source, std::numeric_limits<double>::quiet_NaN());
    }
  }

  Attention paged() const {
    Attention a = whole;
    a.k = page_k;
    a.v = page_v;
    a.options.block_table = table;
    return a;
  }
};

TEST(CpuCache, H04_unused_slots_full_of_nan_change_nothing) {
  TwoCaches caches({4, 1, 128, 8, 8, 64, 64}, 16, {32, 64, 96, 48}, DType::bf16);
  Attention clean = caches.whole;
  for (Array* array : {&clean.k, &clean.v})
    array->for_each([&](const Dims& at) {
      if (std::isnan((*array)[at])) array->set(at, 0);
    });
  for (Attention* a : {&caches.whole, &clean}) forward(a->in(), a->out(), a->options);
  EXPECT_TRUE(same_results(caches.whole, clean));
  EXPECT_TRUE(forward_agrees(clean.in(), clean.out(), clean.options));
}

TEST(CpuCache, H05_H07_H12_H15_pages_of_any_size_equal_the_contiguous_cache) {
  for (const std::int64_t page : {1, 4, 13, 16, 48, 129, 256, 600})
    for (const std::vector<double>& lengths : {std::vector<double>{13, 300, 0}, {16, 272, 1}}) {
      TwoCaches caches({3, 5, 300, 4, 2, 24, 16}, page, lengths);
      caches.whole.options.causal = Causal::bottom_right;
      Attention paged = caches.paged();
      for (Attention* a : {&caches.whole, &paged}) forward(a->in(), a->out(), a->options);
      EXPECT_TRUE(same_results(caches.whole, paged)) << page;
      EXPECT_TRUE(forward_agrees(paged.in(), paged.out(), paged.options)) << page;
    }
}

TEST(CpuCache, H12_varlen_queries_of_192_over_values_of_128) {
  TwoCaches caches({2, 7, 150, 16, 16, 192, 128}, 48, {100, 150}, DType::bf16);
  Attention paged = caches.paged(), varlen = paged;
  varlen.q = Array(DType::bf16, {14, 16, 192}).fill([&](const Dims& at) {
    return paged.q[{at[0] / 7, at[0] % 7, at[1], at[2]}];
  });
  varlen.o = Array(DType::bf16, {14, 16, 128});
  varlen.lse = Array(DType::fp32, {16, 14});
  const Array bounds = int32_array({0, 7, 14});
  varlen.options.cu_seqlens_q = bounds;
  for (Attention* a : {&paged, &varlen}) forward(a->in(), a->out(), a->options);
  EXPECT_TRUE(forward_agrees(paged.in(), paged.out(), paged.options));
  paged.o.for_each([&](const Dims& at) { ASSERT_EQ(paged.o[at], (varlen.o[{at[0] * 7 + at[1], at[2], at[3]}])); });
}

TEST(CpuCache, A04_an_empty_sequence_gets_zero_and_minus_infinity) {
  TwoCaches caches({2, 1, 40, 4, 1, 64, 32}, 16, {0, 40});
  Attention paged = caches.paged();
  forward(paged.in(), paged.out(), paged.options);
  for (std::int64_t h = 0; h < 4; ++h) {
    EXPECT_EQ((paged.lse[{0, h, 0}]), -kInfinite);
    for (std::int64_t x = 0; x < 32; ++x) EXPECT_EQ((paged.o[{0, 0, h, x}]), 0);
  }
}

TEST(CpuCache, E13_a_window_or_key_begin_is_exact_to_the_token_and_what_it_hides_is_not_read) {
  for (const auto& [begin, windowed] :
       {std::pair{99, true}, {84, true}, {83, true}, {82, true}, {62, true}, {83, false}, {62, false}}) {
    TwoCaches caches({1, 1, 100, 2, 1, 8, 96}, 16, {100});
    Attention paged = caches.paged();
    paged.q.fill(0);
    paged.options.causal = Causal::bottom_right;
    const Array bound(DType::int32, {1, 1}, {static_cast<double>(begin)});
    if (windowed)
      paged.options.window.left = 99 - begin;
    else
      paged.options.key_begin = bound;
    Array table = caches.table;
    for (std::int64_t slot = 0; slot < 100; ++slot) {
      const std::int64_t at = static_cast<std::int64_t>(table[{0, slot / 16}]);
      for (std::int64_t x = 0; x < 96; ++x)
        paged.v.set({at, slot % 16, 0, x}, slot < begin ? kNaN : slot % 96 == x ? 1.0 : 0.0);
    }
    for (std::int64_t page = 0; page < begin / 16; ++page) table.set({0, page}, -7);
    paged.options.block_table = table;
    forward(paged.in(), paged.out(), paged.options);
    EXPECT_EQ(std::lround(std::exp(paged.lse[{0, 1, 0}])), 100 - begin);
    for (std::int64_t j = begin; j < 96; ++j)
      EXPECT_EQ(std::lround(paged.o[{0, 0, 1, j}] * static_cast<double>(100 - begin)), 1) << j;
  }
}

TEST(CpuCache, H02_more_keys_than_the_cache_holds_are_refused_and_nothing_is_written) {
  Attention a({2, 1, 20, 2, 1, 8, 8});
  const Array filled = int32_array({3, 19}), fresh = Array(DType::fp32, {2, 2, 1, 8}).fill(1), k = a.k, v = a.v;
  a.options.cache_seqlens = filled;
  a.options.k_new = a.options.v_new = fresh;
  EXPECT_THROW(forward(a.in(), a.out(), a.options), Error);
  EXPECT_TRUE(a.k.same_bits(k) && a.v.same_bits(v) && std::isnan(a.o[{0, 0, 0, 0}]));
}

TEST(CpuCache, H09_steps_of_decoding_with_splits_are_never_nan) {
  TwoCaches caches({1, 1, 1040, 2, 1, 8, 8}, 16, {1010});
  Attention& a = caches.whole;
  for (std::int64_t step = 0; step < 30; ++step) {
    const Array filled = int32_array({static_cast<double>(1010 + step)});
    const Array fresh = Array(DType::fp32, {1, 1, 1, 8}).fill_gaussian(static_cast<std::uint64_t>(step));
    a.options.cache_seqlens = filled;
    a.options.k_new = a.options.v_new = fresh;
    forward(a.in(), a.out(), a.options);
    ASSERT_TRUE(forward_agrees(a.in(), a.out(), a.options)) << step;
    ASSERT_EQ((a.v[{0, 1010 + step, 0, 5}]), (fresh[{0, 0, 0, 5}]));
  }
}

TEST(CpuCache, without_queries_new_keys_are_appended_all_the_same) {
  Attention a({2, 0, 9, 2, 1, 8, 8});
  const Array filled = int32_array({3, 7}), fresh = Array(DType::fp32, {2, 2, 1, 8}).fill_gaussian(5);
  a.options.cache_seqlens = filled;
  a.options.k_new = a.options.v_new = fresh;
  forward(a.in(), a.out(), a.options);
  fresh.for_each([&](const Dims& at) {
    const Dims place{at[0], static_cast<std::int64_t>(filled[{at[0]}]) + at[1], at[2], at[3]};
    EXPECT_EQ(a.k[place], fresh[at]);
    EXPECT_EQ(a.v[place], fresh[at]);
  });
}

TEST(CpuCache, H10_splits_agree_with_the_whole) {
  const int keys = repeats(4096, 1024);
  Attention a({1, 1, keys, 16, 8, 128, 128}, DType::bf16);
  const Array filled = int32_array({static_cast<double>(keys)});
  a.options.cache_seqlens = filled;
  for (const int splits : {0, 1, 3, 16, 32}) {
    a.options.num_splits = splits;
    a.o.poison();
    forward(a.in(), a.out(), a.options);
    EXPECT_TRUE(forward_agrees(a.in(), a.out(), a.options)) << splits;
  }
}

TEST(CpuCache, H14_C16_the_lengths_of_this_call_decide_and_of_this_sequence_alone) {
  TwoCaches caches({4, 1, 1024, 8, 2, 32, 32}, 16, {900, 1000, 120, 500});
  Attention before = caches.whole, after = caches.whole;
  const Array shorter = int32_array({800, 1000, 120, 500});
  after.options.cache_seqlens = shorter;
  for (Attention* a : {&before, &after}) forward(a->in(), a->out(), a->options);
  EXPECT_TRUE(forward_agrees(after.in(), after.out(), after.options));
  before.o.for_each([&](const Dims& at) {
    if (at[0] == 0) return;
    ASSERT_EQ(before.o[at], after.o[at]);
  });
  EXPECT_NE((before.lse[{0, 0, 0}]), (after.lse[{0, 0, 0}]));
}

TEST(CpuCache, H17_leftpad_is_as_if_the_padding_were_not_there) {
  Attention padded({2, 3, 60, 2, 1, 16, 16}), plain({2, 3, 60, 2, 1, 16, 16});
  const Array pad = int32_array({7, 0}), filled = int32_array({50, 33}), less = int32_array({43, 33});
  const auto copy = [](Array& to, const Array& from) {
    to.fill([&](const Dims& at) {
      const std::int64_t slot = at[0] == 0 ? std::min<std::int64_t>(at[1] + 7, 59) : at[1];
      return from[{at[0], slot, at[2], at[3]}];
    });
  };
  copy(plain.k, padded.k);
  copy(plain.v, padded.v);
  padded.options.leftpad = pad;
  padded.options.cache_seqlens = filled;
  plain.options.cache_seqlens = less;
  for (Attention* a : {&padded, &plain}) {
    a->options.causal = Causal::bottom_right;
    forward(a->in(), a->out(), a->options);
  }
  EXPECT_TRUE(same_results(padded, plain));
}

TEST(CpuCache, H19_alibi_means_the_same_in_varlen_and_cache_calls) {
  const Array slopes(DType::fp32, {2}, std::vector<double>{0.5, 0.25}),
      bounds_q = int32_array({0, 5}), bounds_k = int32_array({0, 40}), filled = int32_array({40});
  Attention varlen = Attention::packed({1, 5, 40, 2, 2, 16, 16}), cache({1, 5, 40, 2, 2, 16, 16});
  for (Attention* a : {&varlen, &cache}) a->options.alibi_slopes = slopes;
  varlen.options.cu_seqlens_q = bounds_q;
  varlen.options.cu_seqlens_k = bounds_k;
  cache.options.cache_seqlens = filled;
  for (Attention* a : {&varlen, &cache}) forward(a->in(), a->out(), a->options);
  EXPECT_EQ(varlen.o.values(), cache.o.values());
  EXPECT_EQ(varlen.lse.values(), cache.lse.values());
}

TEST(CpuCache, H20_rotary_tables_of_full_width_are_refused_and_halves_match_by_hand) {
  for (const bool interleaved : {false, true}) {
    Attention a({1, 2, 9, 1, 1, 4, 4}), by_hand = a;
    const Array filled = int32_array({6});
    Array cosine(DType::fp64, {9, 2}), sine(DType::fp64, {9, 2});
    const auto angle = [](std::int64_t position, std::int64_t pair) {
      return static_cast<double>(position) * (pair ? 0.01 : 1.0);
    };
    cosine.fill([&](const Dims& at) { return std::cos(angle(at[0], at[1])); });
    sine.fill([&](const Dims& at) { return std::sin(angle(at[0], at[1])); });
    by_hand.q.fill([&](const Dims& at) {
      const std::int64_t pair = interleaved ? at[3] / 2 : at[3] % 2, first = interleaved ? 2 * pair : pair,
                         second = interleaved ? first + 1 : first + 2;
      const double x = a.q[{0, at[1], 0, first}], y = a.q[{0, at[1], 0, second}], turn = angle(6 + at[1], pair);
      return at[3] == first ? x * std::cos(turn) - y * std::sin(turn) : x * std::sin(turn) + y * std::cos(turn);
    });
    by_hand.options.cache_seqlens = a.options.cache_seqlens = filled;
    a.options.rotary_cos = cosine;
    a.options.rotary_sin = sine;
    a.options.rotary_interleaved = interleaved;
    for (Attention* call : {&a, &by_hand}) forward(call->in(), call->out(), call->options);
    a.lse.for_each([&](const Dims& at) { EXPECT_NEAR(a.lse[at], by_hand.lse[at], 1e-5) << interleaved; });
    const Array wide = Array(DType::fp64, {9, 4}).fill(1);
    a.options.rotary_cos = a.options.rotary_sin = wide;
    EXPECT_THROW(forward(a.in(), a.out(), a.options), Error);
  }
}

TEST(CpuCache, H22_a_nan_new_key_stays_in_its_sequence) {
  TwoCaches caches({3, 1, 30, 2, 1, 8, 8}, 4, {10, 20, 15});
  Attention clean = caches.whole, dirty = caches.whole;
  const Array fresh = Array(DType::fp32, {3, 1, 1, 8}).fill_gaussian(5);
  Array spoiled = fresh;
  spoiled.set({1, 0, 0, 2}, kNaN);
  clean.options.k_new = clean.options.v_new = fresh;
  dirty.options.k_new = dirty.options.v_new = spoiled;
  for (Attention* a : {&clean, &dirty}) forward(a->in(), a->out(), a->options);
  clean.o.for_each([&](const Dims& at) {
    if (at[0] == 1)
      EXPECT_TRUE(at[3] != 2 || std::isnan(dirty.o[at]));
    else
      EXPECT_EQ(clean.o[at], dirty.o[at]);
  });
}

TEST(CpuCache, a_page_may_be_read_under_several_entries) {
  TwoCaches caches({2, 1, 32, 1, 1, 8, 8}, 16, {32, 32});
  Attention paged = caches.paged();
  Array table = caches.table;
  const double shared = table[{0, 1}];
  for (std::int64_t b : {0, 1})
    for (std::int64_t page : {0, 1}) table.set({b, page}, shared);
  paged.options.block_table = table;
  forward(paged.in(), paged.out(), paged.options);
  EXPECT_TRUE(forward_agrees(paged.in(), paged.out(), paged.options));
}

/// Memory that is only there where it is touched.
class HugeMemory {
 public:
  explicit HugeMemory(std::size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  HugeMemory(const HugeMemory&) = delete;
  HugeMemory& operator=(const HugeMemory&) = delete;
  ~HugeMemory() { munmap(data_, bytes_); }
  void* data() const { return data_; }
  bool mapped() const { return data_ != MAP_FAILED; }

 private:
  std::size_t bytes_;
  void* data_;
};

TEST(CpuCache, D14_pages_beyond_2_31_elements) {
  const std::int64_t pages = 70000, page = 16, hk = 8, d = 256;  // 2.3e9 elements each
  const std::size_t bytes = static_cast<std::size_t>(pages * page * hk * d) * 2;
  const HugeMemory k_memory(bytes), v_memory(bytes);
  if (!k_memory.mapped() || !v_memory.mapped()) GTEST_SKIP() << "no address space for 2 x " << bytes << " bytes";
  Attention a({1, 1, 1, 8, 8, 256, 256}, DType::bf16);
  const Tensor k{k_memory.data(), DType::bf16, {pages, page, hk, d}, {}, {}},
      v{v_memory.data(), DType::bf16, {pages, page, hk, d}, {}, {}};
  const Array table(DType::int32, {1, 2}, std::vector<double>{65535, 69999}), filled = int32_array({19});
  for (const std::int64_t at : {std::int64_t{65535} * page, std::int64_t{69999} * page})
    for (std::int64_t x = 0; x < page * hk * d; ++x) {
      reference::store(k.data, DType::bf16, at * hk * d + x, std::sin(static_cast<double>(x + at)));
      reference::store(v.data, DType::bf16, at * hk * d + x, std::cos(static_cast<double>(x + at)));
    }
  a.options.block_table = table;
  a.options.cache_seqlens = filled;
  forward({a.q, k, v}, a.out(), a.options);
  EXPECT_TRUE(forward_agrees({a.q, k, v}, a.out(), a.options));
}

}  // namespace
}  // namespace narrows::test
