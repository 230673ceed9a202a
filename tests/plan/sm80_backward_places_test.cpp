// Where the backward kernels' scratch of a block of rows lies: each block has a place of its own, within what the plan counts.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "plan/sm80_backward.hpp"
#include "shared/tile_order.h"

namespace narrows::test {
namespace {

/// Places of a call's blocks, counted.
class Places {
 public:
  Places(i64 pairs, i64 blocks) : blocks_(static_cast<i32>(blocks)), taken_(static_cast<std::size_t>(pairs * blocks)) {}

  void take(bool varlen, i32 sequence, i32 head, i32 heads, i32 first_row, i32 rows, i32 rows_of_block) {
    for (i32 block = 0; block * rows_of_block < rows; ++block) {
      const i64 number = block_place(varlen, sequence, head, heads, first_row, block, rows_of_block).number(blocks_);
      ASSERT_GE(number, 0);
      ASSERT_LT(number, static_cast<i64>(taken_.size())) << "sequence " << sequence << ", block " << block;
      ASSERT_FALSE(taken_[static_cast<std::size_t>(number)]) << "sequence " << sequence << ", block " << block;
      taken_[static_cast<std::size_t>(number)] = true;
    }
  }

 private:
  i32 blocks_;
  std::vector<bool> taken_;
};

class Sm80BackwardPlaces : public testing::TestWithParam<bool> {
 protected:
  i32 between(i32 low, i32 high) { return std::uniform_int_distribution<i32>(low, high)(random_); }

 private:
  std::mt19937 random_{1};
};

TEST_P(Sm80BackwardPlaces, every_block_has_its_own) {
  const bool varlen = GetParam();
  for (int repeat = 0; repeat < 4000; ++repeat) {
    SCOPED_TRACE(repeat);
    Problem problem;
    problem.batch = between(1, 9), problem.kv_heads = between(1, 3), problem.heads = problem.kv_heads * between(1, 3);
    if (varlen) problem.query_form = QueryForm::varlen, problem.key_form = KeyForm::varlen;
    std::vector<i32> starts{0};
    for (i64 s = 0; s < problem.batch; ++s) starts.push_back(starts.back() + (between(0, 3) ? between(0, 200) : 0));
    // Rows behind the last sequence are one more.
    problem.query_rows = problem.key_rows = varlen ? starts.back() + between(0, 150) : between(1, 300);
    starts.push_back(static_cast<i32>(problem.query_rows));
    const i32 rows_of_block = 16 << between(0, 3);
    const Sm80BackwardBlocks blocks = backward_blocks(problem, rows_of_block, rows_of_block);
    Places queries(blocks.query_pairs, blocks.query_blocks), keys(blocks.key_pairs, blocks.key_blocks);
    const auto take = [&](Places& places, i64 heads) {
      for (i32 s = 0; s < static_cast<i32>(problem.batch) + (varlen ? 1 : 0); ++s)
        for (i32 head = 0; head < static_cast<i32>(heads); ++head) {
          const i32 first = varlen ? starts[static_cast<std::size_t>(s)] : 0;
          const i32 rows =
              varlen ? starts[static_cast<std::size_t>(s) + 1] - first : static_cast<i32>(problem.query_rows);
          ASSERT_NO_FATAL_FAILURE(places.take(varlen, s, head, static_cast<i32>(heads), first, rows, rows_of_block));
        }
    };
    ASSERT_NO_FATAL_FAILURE(take(queries, problem.heads));
    ASSERT_NO_FATAL_FAILURE(take(keys, problem.kv_heads));
    // Turns are of a warp of a query block.
    EXPECT_EQ(backward_turns(problem, rows_of_block, 8), 8 * blocks.query_pairs * blocks.query_blocks);
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, Sm80BackwardPlaces, testing::Bool(),
                         [](const auto& param_info) { return param_info.param ? "varlen" : "dense"; });

}  // namespace
}  // namespace narrows::test
