// Which rows the table has. Nothing is measured.
#include "tools/bench_table.hpp"

#include <algorithm>
#include <numeric>
#include <set>
#include <tuple>

#include <gmock/gmock.h>

#include "tools/bench_call.hpp"

namespace narrows::cli {
namespace {

constexpr std::int64_t kCache = std::int64_t{32} << 20;

std::int64_t key_bytes(const Row& row) {
  return row.sk * row.hk * (row.d + row.dv) * static_cast<std::int64_t>(item_size(row.dtype));
}

TEST(BenchTable, holds_every_cell_that_the_targets_speak_of) {
  using Cell = std::tuple<Op, Case, DType, std::int64_t, std::int64_t, bool, int>;
  std::set<Cell> cells;
  std::size_t count = 0;
  for (const Row& row : rows_of({}, 2, kCache)) {
    ++count;
    if (row.op != Op::decode) cells.insert({row.op, row.special, row.dtype, row.d, row.sq, row.causal, row.threads});
  }
  for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16})
    for (const std::int64_t d : {64, 128})
      for (const int threads : {1, 2}) {
        for (const bool causal : {false, true}) {
          for (const std::int64_t sq : {512, 1024, 4096, 16384})
            EXPECT_TRUE(cells.contains({Op::forward, Case::plain, dtype, d, sq, causal, threads}));
          for (const std::int64_t sq : {512, 1024, 4096})
            EXPECT_TRUE(cells.contains({Op::backward, Case::plain, dtype, d, sq, causal, threads}));
          EXPECT_TRUE(cells.contains({Op::forward, Case::varlen, dtype, d, 16384, causal, threads}));
          EXPECT_TRUE(cells.contains({Op::forward, Case::gqa4, dtype, d, 2048, causal, threads}));
        }
        EXPECT_TRUE(cells.contains({Op::forward, Case::window512, dtype, d, 16384, true, threads}));
        for (const Case special : {Case::bias, Case::mask, Case::softcap, Case::alibi, Case::dropout})
          EXPECT_TRUE(cells.contains({Op::forward, special, dtype, d, 2048, false, threads}));
      }
  EXPECT_EQ(cells.size(), 12U * (2 * (4 + 3 + 1 + 1) + 1 + 5));
  EXPECT_EQ(count, cells.size() + 12 * 4);  // of decode: within and beyond the cache, plain and paged
}

TEST(BenchTable, decode_keys_lie_within_the_last_cache_and_beyond_it) {
  for (const std::int64_t cache : {kCache, std::int64_t{96} << 20}) {
    Selection selection;
    selection.op = {Op::decode};
    const std::vector<Row> rows = rows_of(selection, 1, cache);
    ASSERT_EQ(rows.size(), 24U);
    int within = 0, beyond = 0;
    for (const Row& row : rows) {
      EXPECT_EQ(row.sq, 1);
      EXPECT_EQ(row.h, 32);
      EXPECT_EQ(row.hk, 8);
      within += key_bytes(row) > cache / 8 && key_bytes(row) <= cache / 2;
      beyond += key_bytes(row) >= 2 * cache && key_bytes(row) <= 4 * cache;
    }
    EXPECT_EQ(within, 12);
    EXPECT_EQ(beyond, 12);
  }
}

TEST(BenchTable, a_machine_of_many_cores_has_a_head_for_each_of_eight_and_keys_of_a_gibibyte_at_most) {
  for (const Row& row : rows_of({}, 64, std::int64_t{1} << 30)) {
    EXPECT_TRUE(row.threads == 1 || row.threads == 64);
    if (row.op == Op::decode) {
      EXPECT_LE(key_bytes(row), std::int64_t{1} << 30);
    } else if (row.special != Case::gqa4) {
      EXPECT_EQ(row.h, std::clamp<std::int64_t>(16384 / row.sq, row.threads == 1 ? 1 : 8, 32));
    }
  }
}

TEST(BenchTable, quick_is_a_small_part_of_all_cores) {
  Selection selection;
  selection.quick = true;
  const std::vector<Row> rows = rows_of(selection, 2, kCache);
  EXPECT_EQ(rows.size(), 2U * (4 + 2 + 4));
  for (const Row& row : rows) {
    EXPECT_EQ(row.threads, 2);
    EXPECT_EQ(row.d, 64);
    EXPECT_TRUE(row.dtype == DType::fp32 || row.dtype == DType::bf16);
    EXPECT_TRUE(row.special == Case::plain || row.op == Op::decode);
  }
}

TEST(BenchTable, a_size_leaves_cases_to_who_names_them) {
  Selection selection;
  selection.op = {Op::forward};
  selection.sq = {300};
  selection.d = {40};
  selection.dtype = {DType::bf16};
  selection.causal = {true};
  selection.threads = {3};
  std::vector<Row> rows = rows_of(selection, 8, kCache);
  ASSERT_EQ(rows.size(), 1U);
  EXPECT_EQ(rows[0].special, Case::plain);
  EXPECT_EQ(rows[0].sq, 300);
  EXPECT_EQ(rows[0].sk, 300);
  EXPECT_EQ(rows[0].d, 40);
  EXPECT_EQ(rows[0].dv, 40);
  EXPECT_EQ(rows[0].h, 32);
  EXPECT_EQ(rows[0].threads, 3);
  selection.special = {Case::varlen, Case::gqa4, Case::paged16};
  rows = rows_of(selection, 8, kCache);
  ASSERT_EQ(rows.size(), 2U);  // paged16 is of decode
  EXPECT_EQ(rows[0].b, std::ssize(zipf_lengths(300)));
  EXPECT_EQ(rows[1].hk, 8);
}

TEST(BenchTable, zipf_lengths_add_up_and_fall_as_one_by_rank) {
  for (const std::int64_t total : {1, 3, 7, 300, 16384}) {
    std::vector<std::int32_t> lengths = zipf_lengths(total);
    EXPECT_EQ(std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0}), total);
    std::sort(lengths.rbegin(), lengths.rend());
    EXPECT_GE(lengths.back(), 1);
  }
  std::vector<std::int32_t> lengths = zipf_lengths(16384);
  EXPECT_FALSE(std::is_sorted(lengths.rbegin(), lengths.rend()));
  std::sort(lengths.rbegin(), lengths.rend());
  EXPECT_THAT(std::vector(lengths.begin(), lengths.begin() + 4), testing::ElementsAre(4096, 2048, 1365, 1024));
}

TEST(BenchCall, extra_bytes_are_those_of_the_plan) {
  Row row{};
  row.op = Op::forward;
  row.dtype = DType::fp32;
  row.b = 1;
  row.h = row.hk = 2;
  row.sq = row.sk = 64;
  row.d = row.dv = 16;
  row.threads = 1;
  const BenchCall call(row);
  std::vector<float> q(64 * 2 * 16), k(q), v(q);
  Options options;
  options.threads = 1;
  const Dims shape{1, 64, 2, 16};
  EXPECT_EQ(call.extra_bytes(),
            workspace_size({view(q.data(), shape), view(k.data(), shape), view(v.data(), shape)}, options));
  EXPECT_EQ(call.flops(), 4.0 * 16 * 2 * 64 * 64);
  EXPECT_EQ(call.bytes(), 4 * 4 * 2 * 64 * 16);
}

}  // namespace
}  // namespace narrows::cli
