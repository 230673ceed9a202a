// Lengths, bounds and tables of cache calls, which only the device knows: a sequence that breaks a rule gets NaN and no
// new key, `status` says why, and what no row sees is not read. Sizes of nothing, of one, and of more sequences than a
// thread block has threads.
#include "tests/gpu/paged.hpp"

#include <limits>

namespace narrows::test {
namespace {

using GpuCacheLengths = GpuTest;

/// Whether a cache holds what it did in every page of a sequence.
void expect_pages_untouched(const Paged& call, const Array& before, std::int64_t b) {
  for (std::int64_t slot = 0; slot < call.pages * call.page; ++slot)
    for (std::int64_t x = 0; x < 64; ++x) {
      const std::int64_t page = call.page_of(b, slot);
      if (page < 0 || page >= call.batch * call.pages) break;
      const double now = call.a.k[{page, slot % call.page, 1, x}], then = before[{page, slot % call.page, 1, x}];
      ASSERT_TRUE(now == then || (std::isnan(now) && std::isnan(then))) << "sequence " << b << " slot " << slot;
    }
}

/// Rows of a dense call: NaN, or bit for bit those of another.
void expect_rows(const Attention& a, const Attention& legal, std::int64_t b, bool broken) {
  a.o.for_each([&](const Dims& at) {
    if (at[0] != b) return;
    ASSERT_TRUE(broken ? std::isnan(a.o[at]) : a.o[at] == legal.o[at]) << to_text(at);
  });
  a.lse.for_each([&](const Dims& at) {
    if (at[0] != b) return;
    ASSERT_TRUE(broken ? std::isnan(a.lse[at]) : a.lse[at] == legal.lse[at]) << to_text(at);
  });
}

/// A packed call's rows [begin, end).
void expect_packed_rows(const Attention& a, const Attention& legal, std::int64_t begin, std::int64_t end, bool broken) {
  a.o.for_each([&](const Dims& at) {
    if (at[0] < begin || end <= at[0]) return;
    ASSERT_TRUE(broken ? std::isnan(a.o[at]) : a.o[at] == legal.o[at]) << to_text(at);
  });
  for (std::int64_t h = 0; h < 4; ++h)
    for (std::int64_t row = begin; row < end; ++row)
      ASSERT_TRUE((broken ? std::isnan(a.lse[{h, row}]) : a.lse[{h, row}] == legal.lse[{h, row}])) << row;
}

/// Three sequences of 40, 100 and 200 keys to which 2, 1 and 3 are appended, of 7 rows.
struct Appending : Paged {
  Array bounds = int32_array({0, 2, 3, 6}), k_new{DType::bf16, {7, 2, 64}}, v_new{DType::bf16, {7, 2, 64}};

  Appending() : Paged({40, 100, 200}, 2) {
    k_new.fill_gaussian(8);
    v_new.fill_gaussian(9);
    a.options.batch_invariant = true;  // keys of the others are shared out alike
    a.options.k_new = k_new;
    a.options.v_new = v_new;
    a.options.cu_seqlens_k_new = bounds;
  }
};

TEST_F(GpuCacheLengths, bounds_of_new_keys) {
  Appending legal;
  ASSERT_EQ(legal.run().code, 0);
  struct Case {
    std::int64_t index;
    double value;
    CallStatus status;
    std::vector<std::int64_t> whole;
  };
  for (const Case& c : {Case{0, 1, {12, 0, 1, 0}, {1, 2}}, Case{2, 1, {13, 1, 1, 2}, {0}},
                        Case{3, 8, {14, 2, 8, 7}, {0, 1}}, Case{3, kMost, {14, 2, kMost, 7}, {0, 1}}}) {
    SCOPED_TRACE(c.status.code);
    Appending call;
    const Array before = call.a.k;
    call.bounds.set({c.index}, c.value);
    expect_status(call.run(), c.status);
    expect_pages_untouched(call, before, c.status.sequence);
    expect_rows(call.a, legal.a, c.status.sequence, true);
    for (const std::int64_t b : c.whole) expect_rows(call.a, legal.a, b, false);
  }
}

TEST_F(GpuCacheLengths, positions_that_no_table_of_angles_has) {
  const Array angles = std::move(Array(DType::fp32, {304, 16}).fill_gaussian(3)), bases = int32_array({0, -1, 5});
  Paged legal({40, 100, 299}, 5), far({40, 100, 300}, 5), negative({40, 100, 299}, 5);
  for (Paged* call : {&legal, &far, &negative}) {
    call->a.options.batch_invariant = true;
    call->a.options.rotary_cos = call->a.options.rotary_sin = angles;
  }
  ASSERT_EQ(legal.run().code, 0);
  expect_status(far.run(), {21, 2, 305, 304});
  for (const std::int64_t b : {0, 1, 2}) expect_rows(far.a, legal.a, b, b == 2);
  negative.a.options.rotary_base = bases;
  expect_status(negative.run(), {20, 1, -1, 0});
  expect_rows(negative.a, legal.a, 1, true);
  EXPECT_FALSE(std::isnan(negative.a.lse[{0, 0, 0}]) || std::isnan(negative.a.lse[{2, 3, 4}]));
}

/// Query rows 0..1, 2..4 and 5..8 of three sequences, and 2 rows of none.
struct PackedQueries : Paged {
  Array starts = int32_array({0, 2, 5, 9}), used = int32_array({2, 3, 4}), bias, k_new, v_new;

  PackedQueries() : Paged({40, 100, 300}, 1) {
    a.q = std::move(Array(DType::bf16, {11, 4, 64}).fill_gaussian(7));
    a.o = Array(DType::bf16, {11, 4, 64});
    a.lse = Array(DType::fp32, {4, 11});
    a.options.batch_invariant = true;
    a.options.cu_seqlens_q = starts;
    k_new = fresh(0, 1, true);
    v_new = fresh(0, 1, false);
    a.options.k_new = k_new;
    a.options.v_new = v_new;
  }
  void give_bias(std::int64_t rows, std::int64_t keys) {
    bias = Array(DType::fp32, {rows, keys});
    bias.fill(0);
    a.options.bias = bias;
  }
};

TEST_F(GpuCacheLengths, bounds_of_queries_that_break_make_all_rows_nan_and_append_nothing) {
  for (const auto& [index, value, status] :
       {std::tuple{0, 1, CallStatus{1, 0, 1, 0}}, std::tuple{2, 1, CallStatus{2, 1, 1, 2}},
        std::tuple{3, 12, CallStatus{3, 2, 12, 11}}, std::tuple{3, kMost, CallStatus{3, 2, kMost, 11}}}) {
    SCOPED_TRACE(status.code);
    PackedQueries call;
    const Array before = call.a.k;
    call.starts.set({index}, value);
    expect_status(call.run(), status);
    expect_packed_rows(call.a, call.a, 0, 11, true);
    for (const std::int64_t b : {0, 1, 2}) expect_pages_untouched(call, before, b);
  }
}

TEST_F(GpuCacheLengths, queries_used_and_what_bias_reaches) {
  PackedQueries legal;
  ASSERT_EQ(legal.run().code, 0);
  expect_packed_rows(legal.a, legal.a, 0, 9, false);
  for (std::int64_t row = 9; row < 11; ++row) {
    EXPECT_EQ((legal.a.o[{row, 3, 63}]), 0);
    EXPECT_EQ((legal.a.lse[{3, row}]), -std::numeric_limits<double>::infinity());
  }
  const std::vector<std::int64_t> starts{0, 2, 5, 9};
  const auto expect_one_broken = [&](PackedQueries& call, const CallStatus& status, bool same_program) {
    const Array before = call.a.k;
    expect_status(call.run(), status);
    for (std::size_t s = 0; s < 3; ++s) {
      const bool broken = static_cast<int>(s) == status.sequence;
      if (broken || same_program) expect_packed_rows(call.a, legal.a, starts[s], starts[s + 1], broken);
      if (broken) expect_pages_untouched(call, before, static_cast<std::int64_t>(s));
    }
  };
  for (const int wrong : {4, -1}) {
    PackedQueries call;
    call.a.options.seqused_q = call.used;
    call.used.set({1}, wrong);
    expect_one_broken(call, {7, 1, wrong, 3}, true);
  }
  PackedQueries rows, keys;
  rows.give_bias(3, 320);
  expect_one_broken(rows, {9, 2, 4, 3}, false);
  keys.give_bias(4, 300);
  expect_one_broken(keys, {10, 2, 301, 300}, false);
}

/// A sequence of 40 keys and a new one, of which the row sees those from 32 on: pages 0 and 1 of 16 are nobody's.
TEST_F(GpuCacheLengths, pages_before_a_rows_first_key_need_not_be_there) {
  const Array begins(DType::int32, {1, 1}, {32});
  const auto make = [&](Paged& call, const Array& k_new, const Array& v_new) {
    call.a.options.key_begin = begins;
    call.a.options.k_new = k_new;
    call.a.options.v_new = v_new;
  };
  Paged legal({40}, 1), call({40}, 1);
  const Array k_new = call.fresh(40, 1, true), v_new = call.fresh(40, 1, false);
  make(legal, k_new, v_new);
  make(call, k_new, v_new);
  for (const std::int64_t page : {0, 1}) call.table.set({0, page}, -1);
  ASSERT_EQ(legal.run().code, 0);
  EXPECT_EQ(call.run().code, 0);
  EXPECT_EQ((call.a.k[{call.page_of(0, 40), 8, 1, 3}]), (k_new[{0, 0, 1, 3}]));
  EXPECT_TRUE(call.a.o.same_bits(legal.a.o) && call.a.lse.same_bits(legal.a.lse));
}

/// Of 32 new rows with a window of 16 keys the last ones do not see the page that is missing: they would see slots that
/// nobody filled.
TEST_F(GpuCacheLengths, a_sequence_that_misses_a_page_is_nan_in_every_row) {
  Paged legal({64, 64, 10}, 32), call({64, 64, 10}, 32);
  const Array k_new = call.fresh(64, 32, true), v_new = call.fresh(64, 32, false), before = call.a.k;
  for (Paged* each : {&legal, &call}) {
    each->a.options.window.left = 15;
    each->a.options.batch_invariant = true;
    each->a.options.k_new = k_new;
    each->a.options.v_new = v_new;
  }
  call.table.set({1, 3}, -1);
  ASSERT_EQ(legal.run().code, 0);
  expect_status(call.run(), {19, 1, -1, 59});
  expect_pages_untouched(call, before, 1);
  for (const std::int64_t b : {0, 1, 2}) expect_rows(call.a, legal.a, b, b == 1);
}

TEST_F(GpuCacheLengths, a_pool_without_pages) {
  Paged call({0, 0}, 2);
  call.a.k = Array(DType::bf16, {0, 16, 2, 64});
  call.a.v = Array(DType::bf16, {0, 16, 2, 64});
  call.table.fill(-1);
  call.filled.set({0}, 5);
  expect_status(call.run(), {15, 0, 5, 0});
  expect_rows(call.a, call.a, 0, true);
  EXPECT_EQ((call.a.o[{1, 1, 3, 63}]), 0);
  EXPECT_EQ((call.a.lse[{1, 3, 1}]), -std::numeric_limits<double>::infinity());
}

void expect_empty(const Attention& a) {
  for (const double x : a.o.values()) ASSERT_EQ(x, 0);
  for (const double x : a.lse.values()) ASSERT_EQ(x, -std::numeric_limits<double>::infinity());
}

TEST_F(GpuCacheLengths, rows_of_a_call_without_sequences) {
  const Array starts = int32_array({0}), none(DType::int32, {0});
  for (const bool cached : {true, false}) {
    SCOPED_TRACE(cached ? "a cache" : "splits");
    Attention a = Attention::packed({1, 5, 7, 4, 2, 64, 64}, DType::bf16);
    a.options.cu_seqlens_q = starts;
    if (cached) {
      a.k = Array(DType::bf16, {0, 64, 2, 64});
      a.v = Array(DType::bf16, {0, 64, 2, 64});
      a.options.cache_seqlens = none;
    } else {
      a.options.cu_seqlens_k = starts;
      a.options.num_splits = 2;
    }
    a.options.family = "sm80";
    DeviceCall gpu(a.in(), a.out(), a.options);
    gpu.run();
    gpu.download();
    EXPECT_EQ(gpu.status().code, 0);
    expect_empty(a);
    EXPECT_TRUE(gpu.surroundings_intact());
  }
}

TEST_F(GpuCacheLengths, caches_of_no_slots_and_no_heads) {
  for (const bool paged : {false, true}) {
    Attention a({2, 3, 1, 4, 2, 64, 64}, DType::bf16);
    const Array lengths = int32_array({0, 0}), table(DType::int32, {2, 0});
    a.k = Array(DType::bf16, {2, paged ? 16 : 0, 2, 64});
    a.v = Array(DType::bf16, {2, paged ? 16 : 0, 2, 64});
    a.options.cache_seqlens = lengths;
    if (paged) a.options.block_table = table;
    a.options.family = "sm80";
    DeviceCall gpu(a.in(), a.out(), a.options);
    gpu.run();
    gpu.download();
    EXPECT_EQ(gpu.status().code, 0);
    expect_empty(a);
  }
  Attention headless({2, 3, 8, 0, 0, 64, 64}, DType::bf16);
  const Array lengths = int32_array({1, 5}), fresh(DType::bf16, {2, 1, 0, 64});
  headless.options.cache_seqlens = lengths;
  headless.options.k_new = headless.options.v_new = fresh;
  headless.options.family = "sm80";
  DeviceCall gpu(headless.in(), headless.out(), headless.options);
  EXPECT_NO_THROW(gpu.run());
}

TEST_F(GpuCacheLengths, H07_pages_of_three_slots) {
  for (const DType dtype : {DType::bf16, DType::fp32}) {
    Paged call({0, 1, 3, 7, 58}, 3, dtype, 20, 3);
    ASSERT_EQ(call.run().code, 0);
    expect_within_bounds(call.a);
  }
}

TEST_F(GpuCacheLengths, H14_a_negative_length_changes_no_other_sequence) {
  Paged legal({900, 1000, 120, 500}, 1, DType::bf16, 64), call({900, 1000, 120, 500}, 1, DType::bf16, 64);
  for (Paged* each : {&legal, &call}) each->a.options.batch_invariant = true;
  call.filled.set({0}, -100);
  ASSERT_EQ(legal.run().code, 0);
  expect_status(call.run(), {15, 0, -100, 1024});
  for (const std::int64_t b : {0, 1, 2, 3}) expect_rows(call.a, legal.a, b, b == 0);
}

/// Lengths far apart, so that each thread block looks for its rows among sequences that it has not all in sight.
TEST_F(GpuCacheLengths, more_sequences_than_a_thread_block_has_threads) {
  std::vector<double> lengths;
  for (int s = 0; s < 600; ++s) lengths.push_back(s % 150 == 7 ? 60 : s * 37 % 20);
  for (const int splits : {0, 2}) {
    Paged call(lengths, 1, DType::bf16, 4);
    call.a.options.num_splits = splits;
    ASSERT_EQ(call.run().code, 0);
    expect_within_bounds(call.a);
  }
}

}  // namespace
}  // namespace narrows::test
