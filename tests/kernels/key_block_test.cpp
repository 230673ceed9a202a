// The keys of each thread block of the backward pass and the query blocks that it walks over, against the definition of a mask: one
// thread finds them here.
#include <gtest/gtest.h>

#include <random>

#include "tests/kernels/device/device.hpp"

namespace key_block {
#include "shared/backward_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::bf16;
[[maybe_unused]] constexpr int kHeadDim = 32, kValueDim = 32, kBlockQueries = 16, kBlockKeys = 32, kWarps = 1,
                               kColumnWarps = 1, kThreads = 1;
[[maybe_unused]] constexpr bool kNatural = false, kSoftcap = false, kVectorSums = false;
}  // namespace narrows

#include "kernels/key_block.cuh"

namespace narrows {

/// A random call: dense or varlen, some lengths given, some rows bounded.
struct CallOfTest {
  static constexpr i32 kBatch = 3, kKvHeads = 2, kGroup = 2;

  std::mt19937 random;
  std::vector<i32> starts_q, starts_k, used_q, used_k, shifts;
  BackwardArgs args;

  i32 between(i32 low, i32 high) { return std::uniform_int_distribution<i32>(low, high)(random); }

  explicit CallOfTest(unsigned seed) : random(seed) {
    const bool varlen = between(0, 1) != 0;
    args.batch = kBatch, args.heads = kKvHeads * kGroup, args.group = kGroup, args.kv_heads = kKvHeads;
    starts_q = starts(60), starts_k = starts(130);
    args.query_rows = varlen ? starts_q.back() + between(0, 40) : between(0, 90);
    args.key_rows = varlen ? starts_k.back() + between(0, 70) : between(0, 200);
    if (varlen) args.cu_seqlens_q = {starts_q.data(), 1}, args.cu_seqlens_k = {starts_k.data(), 1};
    for (i32 s = 0; s < kBatch; ++s) {
      used_q.push_back(between(0, rows(starts_q, args.query_rows, s)));
      used_k.push_back(between(0, rows(starts_k, args.key_rows, s)));
      shifts.push_back(between(-150, 150));
    }
    if (between(0, 2) == 0) args.seqused_q = {used_q.data(), 1};
    if (between(0, 2) == 0) args.seqused_k = {used_k.data(), 1};
    args.top_left = between(0, 3) == 0;
    if (between(0, 2) == 0) args.shift = {shifts.data(), 1};
    args.score_rows = args.score_keys = 1 << 20;
    args.visibility = make_mask(between(0, 1) ? between(0, 90) : -1, between(0, 2) ? -1 : between(0, 30),
                                between(0, 1) != 0, between(0, 2) == 0 ? between(1, 70) : 0);
    args.section = between(1, 4);
    args.query_blocks = static_cast<i32>(blocks(varlen, args.query_rows, kBlockQueries));
    args.key_blocks = static_cast<i32>(blocks(varlen, args.key_rows, kBlockKeys));
  }

  bool varlen() const { return is_varlen(args.cu_seqlens_k); }
  std::vector<KeyBlock> key_blocks() const {
    std::vector<KeyBlock> found;
    const i32 pairs = varlen() ? kKvHeads : kBatch * kKvHeads;
    for (i32 index = 0; index < args.key_blocks * pairs; ++index)
      found.push_back(find_key_block(args, static_cast<u32>(index)));
    return found;
  }

 private:
  std::vector<i32> starts(i32 most) {
    std::vector<i32> at{0};
    for (i32 s = 0; s < kBatch; ++s) at.push_back(at.back() + (between(0, 3) ? between(0, most) : 0));
    return at;
  }
  i32 rows(const std::vector<i32>& at, i32 all, i32 s) const {
    return varlen() ? at[static_cast<std::size_t>(s) + 1] - at[static_cast<std::size_t>(s)] : all;
  }
  static i64 blocks(bool varlen, i32 rows, i32 of_block) {
    return varlen ? block_count(rows, kBatch, of_block) : ceil_div(rows, of_block);
  }
};

/// What a sequence is, from the arguments alone.
struct SequenceOfTest {
  i32 first_query, queries, first_key, keys;
  i64 shift;

  SequenceOfTest(const BackwardArgs& args, i32 s) {
    const auto rows = [&](const IndicesArg& starts, const IndicesArg& used, i32 all, i32& first) {
      first = starts.data ? starts.data[s] : 0;
      const i32 count = starts.data ? starts.data[s + 1] - first : all;
      return used.data ? used.data[s] : count;
    };
    queries = rows(args.cu_seqlens_q, args.seqused_q, args.query_rows, first_query);
    keys = rows(args.cu_seqlens_k, args.seqused_k, args.key_rows, first_key);
    shift = args.shift.data ? args.shift.data[s] : args.top_left ? 0 : i64{keys} - queries;
  }
};

constexpr unsigned kCalls = 3000;

TEST(KeyBlock, every_visible_pair_is_in_one_step) {
  for (unsigned seed = 0; seed < kCalls; ++seed) {
    SCOPED_TRACE(seed);
    const CallOfTest call(seed);
    const std::vector<KeyBlock> blocks = call.key_blocks();
    for (i32 s = 0; s < CallOfTest::kBatch; ++s) {
      const SequenceOfTest sequence(call.args, s);
      std::vector<int> steps(static_cast<std::size_t>(sequence.queries * sequence.keys));
      for (const KeyBlock& block : blocks) {
        if (block.sequence != s || block.kv_head != 1 || block.rows == 0) continue;
        ASSERT_EQ(block.queries, sequence.queries);
        ASSERT_EQ(block.keys, sequence.keys);
        ASSERT_EQ(block.shift, sequence.shift);
        ASSERT_EQ(block.first_query, sequence.first_query);
        ASSERT_EQ(block.first_key, sequence.first_key);
        ASSERT_FALSE(block.broken);
        for (i32 i = block.begin_tile * kBlockQueries; i < min_of(block.end_tile * kBlockQueries, block.queries); ++i)
          for (i32 j = block.first; j < min_of(block.first + kBlockKeys, block.keys); ++j) {
            const bool sees = visible(call.args.visibility, i + block.shift, j, block.keys);
            steps[static_cast<std::size_t>(i * block.keys + j)] += sees;
            // Rows that see no key of the block are not loaded.
            ASSERT_TRUE(!sees || (block.seeing.begin <= i && i < block.seeing.end)) << i << " " << j;
          }
      }
      for (i32 i = 0; i < sequence.queries; ++i)
        for (i32 j = 0; j < sequence.keys; ++j)
          ASSERT_EQ(steps[static_cast<std::size_t>(i * sequence.keys + j)],
                    visible(call.args.visibility, i + sequence.shift, j, sequence.keys) ? 1 : 0)
              << "sequence " << s << ", row " << i << ", key " << j;
    }
  }
}

/// Each key row of the tensors is one block's for each kv head, and blocks differ in their numbers.
void expect_rows_once(const CallOfTest& call) {
  const BackwardArgs& args = call.args;
  const i32 sequences = call.varlen() ? 1 : CallOfTest::kBatch;
  std::vector<int> rows(static_cast<std::size_t>(sequences * CallOfTest::kKvHeads * args.key_rows));
  std::vector<int> numbers(
      static_cast<std::size_t>((call.varlen() ? 1 : args.batch) * args.key_blocks * args.kv_heads));
  for (const KeyBlock& block : call.key_blocks()) {
    ++numbers.at(static_cast<std::size_t>(block.number * args.kv_heads + block.kv_head));
    for (i32 row = 0; row < block.rows; ++row) {
      const i32 at = block.first_key + block.first + row, sequence = call.varlen() ? 0 : block.sequence;
      ASSERT_TRUE(0 <= at && at < args.key_rows) << at;
      ++rows.at(static_cast<std::size_t>((sequence * args.kv_heads + block.kv_head) * args.key_rows + at));
    }
  }
  for (const int count : rows) ASSERT_EQ(count, 1);
  for (const int count : numbers) ASSERT_EQ(count, 1);
}

/// What a block reads lies within the tensors.
void expect_within(const CallOfTest& call) {
  for (const KeyBlock& block : call.key_blocks()) {
    if (block.rows == 0 || block.begin_tile >= block.end_tile) continue;
    ASSERT_GE(block.sequence, 0);
    ASSERT_LT(block.sequence, call.args.batch);
    ASSERT_FALSE(block.broken);
    ASSERT_GE(block.first_key, 0);
    ASSERT_LE(block.first_key + block.keys, call.args.key_rows);
    ASSERT_GE(block.first_query, 0);
    ASSERT_LE(block.first_query + block.queries, call.args.query_rows);
    ASSERT_GE(block.begin_tile, 0);
    ASSERT_LE(block.end_tile, query_tiles(block));
    ASSERT_TRUE(0 <= block.seeing.begin && block.seeing.end <= block.queries);
  }
}

TEST(KeyBlock, every_key_is_of_one_block) {
  for (unsigned seed = 0; seed < kCalls; ++seed) {
    SCOPED_TRACE(seed);
    const CallOfTest call(seed);
    ASSERT_NO_FATAL_FAILURE(expect_rows_once(call));
    ASSERT_NO_FATAL_FAILURE(expect_within(call));
  }
}

TEST(KeyBlock, broken_lengths_lead_nowhere_outside) {
  int broken = 0;
  for (unsigned seed = 0; seed < kCalls; ++seed) {
    SCOPED_TRACE(seed);
    CallOfTest call(seed);
    for (std::vector<i32>* values : {&call.starts_q, &call.starts_k, &call.used_q, &call.used_k})
      for (i32& value : *values)
        if (call.between(0, 4) == 0)
          value = call.between(0, 1) ? call.between(INT_MIN, INT_MAX) : call.between(-9, 250);
    ASSERT_NO_FATAL_FAILURE(expect_rows_once(call));
    ASSERT_NO_FATAL_FAILURE(expect_within(call));
    for (const KeyBlock& block : call.key_blocks()) {
      if (block.rows == 0 || !block.broken) continue;
      ++broken;
      ASSERT_EQ(block.begin_tile, block.end_tile) << "its results are NaN";
    }
  }
  EXPECT_GT(broken, 1000);
}

/// Of the blocks of a sequence's keys, those that visit `tiles` query blocks from `first` on take turns 0, 1, 2 and so on.
/// turn(block): the number that the block finds for itself.
template <class Turn>
void expect_turns(const CallOfTest& call, const std::vector<KeyBlock>& blocks, i32 s, i32 first, i32 tiles,
                  const Turn& turn) {
  std::vector<int> turns(static_cast<std::size_t>(call.args.key_blocks + 1));
  std::size_t visitors = 0;
  for (const KeyBlock& block : blocks) {
    if (block.sequence != s || block.kv_head != 0 || block.rows == 0) continue;
    if (max_of(block.begin_tile, first) >= min_of(block.end_tile, first + tiles)) continue;
    const i32 own = turn(block);
    ASSERT_GE(own, 0) << "block " << block.first << ", query blocks from " << first;
    ++turns.at(static_cast<std::size_t>(own));
    ++visitors;
  }
  for (std::size_t number = 0; number < visitors; ++number)
    ASSERT_EQ(turns[number], 1) << "query blocks from " << first << ", turn " << number;
}

/// Deterministic key blocks add to a group of query blocks in turn: the turns count from its first or last block of keys on,
/// without a gap, for who has no turn would wait without end.
TEST(KeyBlock, visitors_of_a_group_follow_its_first_or_last_key_block) {
  for (unsigned seed = 0; seed < kCalls; ++seed) {
    SCOPED_TRACE(seed);
    const CallOfTest call(seed);
    const std::vector<KeyBlock> blocks = call.key_blocks();
    for (const i32 tiles : {1, 2, 4})
      for (i32 s = 0; s < CallOfTest::kBatch; ++s) {
        const SequenceOfTest sequence(call.args, s);
        for (i32 first = 0; first * kBlockQueries < sequence.queries; first += tiles) {
          ASSERT_NO_FATAL_FAILURE(expect_turns(call, blocks, s, first, tiles, [&](const KeyBlock& block) {
            return block.first / kBlockKeys - first_key_block(call.args, block, first, tiles);
          }));
          ASSERT_NO_FATAL_FAILURE(expect_turns(call, blocks, s, first, tiles, [&](const KeyBlock& block) {
            return last_key_block(call.args, block, first, tiles) - block.first / kBlockKeys;
          }));
        }
      }
  }
}

/// All threads of a thread block find the same.
TEST(KeyBlock, lanes_agree) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    const CallOfTest call(seed);
    const std::vector<KeyBlock> alone = call.key_blocks();
    if (alone.empty()) continue;
    std::array<KeyBlock, kWarp> together;
    ::narrows::test::Warp warp(0);
    const u32 index = seed % static_cast<u32>(alone.size());
    warp.run([&](int lane) { together[static_cast<std::size_t>(lane)] = find_key_block(call.args, index); });
    for (const KeyBlock& block : together) {
      ASSERT_EQ(block.sequence, alone[index].sequence);
      ASSERT_EQ(block.first, alone[index].first);
      ASSERT_EQ(block.rows, alone[index].rows);
      ASSERT_EQ(block.begin_tile, alone[index].begin_tile);
      ASSERT_EQ(block.end_tile, alone[index].end_tile);
    }
  }
}

}  // namespace narrows
}  // namespace key_block
