// What the scheduling warp of the sm90 kernel finds: every query row of every head once, and of each tile which keys it
// sees.
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "tests/kernels/device/device.hpp"

namespace tile_facts {
#include "shared/forward_sm90_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::bf16;
[[maybe_unused]] constexpr int kHeadDim = 64, kValueDim = 64, kBlockQueries = 128, kBlockKeys = 48, kWarps = 8,
                               kWarpgroups = 2, kThreads = 384, kStages = 2;
[[maybe_unused]] constexpr bool kLimitsKeys = true, kCached = false;
}  // namespace narrows

#include "kernels/tile_facts.cuh"

namespace narrows {

/// A dense or a varlen call with lengths that keep every rule.
struct Scheduled {
  std::mt19937 random;
  std::vector<i32> query_starts{0}, key_starts{0}, used_queries, used_keys;
  ForwardSm90Args args;
  bool varlen;

  i32 between(i32 low, i32 high) { return std::uniform_int_distribution<i32>(low, high)(random); }

  explicit Scheduled(unsigned seed) : random(seed), varlen(seed % 2 != 0) {
    args.batch = varlen ? between(1, seed % 8 == 1 ? 200 : 8) : between(1, 4);
    args.group = between(1, 2);
    args.heads = args.group * between(1, 2);
    const i32 most = args.batch > 8 ? 3 : 300;
    args.query_rows = between(1, most);
    args.key_rows = between(1, most);
    for (i32 s = 0; s < args.batch; ++s) {
      const i32 queries = varlen ? between(0, most) : args.query_rows, keys = varlen ? between(0, most) : args.key_rows;
      query_starts.push_back(query_starts.back() + queries);
      key_starts.push_back(key_starts.back() + keys);
      used_queries.push_back(between(0, queries));
      used_keys.push_back(between(0, keys));
    }
    if (varlen) {
      args.query_rows = query_starts.back() + between(0, 150);
      args.key_rows = key_starts.back() + between(0, 50);
      args.cu_seqlens_q = {query_starts.data(), 1};
      args.cu_seqlens_k = {key_starts.data(), 1};
    }
    if (between(0, 1)) args.seqused_q = {used_queries.data(), 1};
    if (between(0, 1)) args.seqused_k = {used_keys.data(), 1};
    args.score_rows = args.score_keys = 0x7fffffff;
    args.top_left = between(0, 3) == 0;
    args.visibility = make_mask(between(0, 1) ? between(0, 90) : -1, between(0, 1) ? between(0, 90) : -1,
                                between(0, 1) != 0, between(0, 2) ? 0 : between(1, 200));
    args.blocks = static_cast<i32>(varlen ? block_count(args.query_rows, args.batch, kBlockQueries)
                                          : ceil_div(args.query_rows, kBlockQueries));
    args.section = between(1, 5);
    args.set_tiles(query_pairs(args));
  }

  i32 queries(i32 s) const {
    return args.seqused_q.data ? used_queries[static_cast<std::size_t>(s)]
           : varlen ? query_starts[static_cast<std::size_t>(s) + 1] - query_starts[static_cast<std::size_t>(s)]
                    : args.query_rows;
  }
  i32 keys(i32 s) const {
    return args.seqused_k.data ? used_keys[static_cast<std::size_t>(s)]
           : varlen            ? key_starts[static_cast<std::size_t>(s) + 1] - key_starts[static_cast<std::size_t>(s)]
                               : args.key_rows;
  }
  bool sees(i32 s, i32 i, i32 j) const {
    const i64 shift = args.top_left ? 0 : i64{keys(s)} - queries(s);
    return visible(args.visibility, i + shift, j, keys(s));
  }

  /// Of thread block `index` of so many, in its order.
  std::vector<TileFacts> tiles_of(u32 index, u32 blocks) const {
    std::vector<TileFacts> found;
    TileFacts facts{};
    ::narrows::test::Warp warp(0);
    warp.run([&](int lane) {
      blockIdx.x = index;
      gridDim.x = blocks;
      for (Scheduler scheduler(args, false);; scheduler.advance()) {
        __syncwarp();
        scheduler.find(facts);
        __syncwarp();
        if (!facts.exists) break;
        if (lane == 0) found.push_back(facts);
      }
    });
    return found;
  }
};

TEST(KernelTileFacts, products_divide) {
  std::mt19937 random(5);
  for (const u32 by : {1u, 2u, 3u, 5u, 7u, 64u, 641u, 65535u, 65536u, 65537u, 0x3fffffffu, 0x40000000u, 0x7fffffffu}) {
    const Divisor divisor(by);
    for (int i = 0; i < 1000; ++i) {
      const u32 n = static_cast<u32>(random() >> 1 >> random() % 31);
      ASSERT_EQ(divisor.quotient(n), n / by) << n << " / " << by;
    }
    for (const u32 n : {0u, by - 1, by, 0x7fffffffu, 0x7fffffffu / by * by, 0x7fffffffu / by * by - 1})
      ASSERT_EQ(divisor.quotient(n), n / by) << n << " / " << by;
  }
  for (u32 pairs = 1; pairs < 12; ++pairs)
    for (u32 section = 1; section <= pairs; ++section)
      for (u32 blocks = 1; blocks < 9; ++blocks)
        for (u32 index = 0; index < blocks * pairs; ++index) {
          const TileNumber found = TileOrder(blocks, pairs, section).at(index);
          const TileNumber expected = tile_number(index, blocks, pairs, section);
          ASSERT_EQ(found.block, expected.block) << index << " of " << blocks << " " << pairs << " " << section;
          ASSERT_EQ(found.pair, expected.pair) << index << " of " << blocks << " " << pairs << " " << section;
        }
}

void expect_sight(const Scheduled& call, const TileFacts& facts) {
  const QueryBlock& block = facts.block;
  const i32 s = block.sequence;
  ASSERT_LT(facts.blocks.begin, facts.blocks.end) << "one block of keys at least";
  std::array<Keys, kWarpgroups> common;
  common.fill({0, kMostKey});
  for (i32 row = 0; row < kBlockQueries; ++row) {
    const i32 i = block.first_row + row;
    const Keys seen = i < block.queries ? facts.sight.of(row) : Keys{0, 0};
    if (s == call.args.batch || i >= block.queries) {
      ASSERT_GE(seen.begin, seen.end) << "row " << i;
      continue;
    }
    const i32 keys = call.keys(s);
    for (i32 j = 0; j < keys; ++j) {
      const bool sees = call.sees(s, i, j);
      ASSERT_EQ(seen.begin <= j && j < seen.end, sees) << "row " << i << " key " << j;
      if (!sees) continue;
      ASSERT_TRUE(facts.blocks.begin <= j / kBlockKeys && j / kBlockKeys < facts.blocks.end) << "key " << j;
      ASSERT_TRUE(facts.clean.begin <= j && j < facts.clean.end) << "key " << j;
    }
    const Keys& own = facts.own[row / kPartRows];
    ASSERT_TRUE(facts.blocks.begin <= own.begin && own.begin < own.end && own.end <= facts.blocks.end);
    if (seen.begin < seen.end) {
      ASSERT_TRUE(own.begin * kBlockKeys <= seen.begin && seen.end <= own.end * kBlockKeys) << "row " << i;
    }
    Keys& all = common[static_cast<std::size_t>(row / kPartRows)];
    all = {max_of(all.begin, seen.begin), min_of(all.end, seen.end)};
  }
  for (int w = 0; w < kWarpgroups; ++w) {
    EXPECT_EQ(facts.common[w].begin, common[static_cast<std::size_t>(w)].begin);
    EXPECT_EQ(facts.common[w].end, common[static_cast<std::size_t>(w)].end);
  }
}

/// Rows of V that are read as they are hold keys that a row sees, or lie behind the tensor, where the engine reads zeros.
void expect_clean(const Scheduled& call, const TileFacts& facts) {
  const i32 s = facts.block.sequence;
  if (s == call.args.batch) return;
  const i32 limit = call.varlen ? facts.clean.end : min_of(facts.clean.end, call.args.key_rows);
  for (i32 j = facts.clean.begin; j < limit; ++j) {
    bool seen = false;
    for (i32 i = 0; i < call.queries(s); ++i) seen = seen || call.sees(s, i, j);
    ASSERT_TRUE(seen) << "key " << j << " of " << limit;
  }
}

TEST(KernelTileFacts, every_row_is_in_one_tile_and_sees_its_keys) {
  for (unsigned seed = 0; seed < 16; ++seed) {
    SCOPED_TRACE(seed);
    Scheduled call(seed);
    const u32 blocks = static_cast<u32>(call.between(1, 3));
    u32 taken = 0;
    if (call.between(0, 1)) call.args.tiles_taken = &taken;
    std::map<std::array<i32, 3>, int> rows;  // sequence or 0, head, row of the tensor
    for (u32 index = 0; index < blocks; ++index)
      for (const TileFacts& facts : call.tiles_of(index, blocks)) {
        const QueryBlock& block = facts.block;
        ASSERT_GT(block.rows, 0);
        for (i32 row = 0; row < block.rows; ++row)
          ++rows[{call.varlen ? 0 : block.sequence, block.head, block.first_query + block.first_row + row}];
        ASSERT_NO_FATAL_FAILURE(expect_sight(call, facts));
        ASSERT_NO_FATAL_FAILURE(expect_clean(call, facts));
      }
    const std::size_t pairs =
        static_cast<std::size_t>(call.varlen ? call.args.heads : call.args.heads * call.args.batch);
    EXPECT_EQ(rows.size(), pairs * static_cast<std::size_t>(call.args.query_rows));
    for (const auto& [row, count] : rows) ASSERT_EQ(count, 1);
  }
}

}  // namespace narrows
}  // namespace tile_facts
