#include "core/calls.hpp"
#include "core/work.hpp"

#include <gtest/gtest.h>

namespace narrows {
namespace {

Work dense_work(std::int64_t batch, std::int64_t queries) {
  const Tensor q{.dtype = DType::bf16, .shape = {batch, queries, 2, 8}};
  const Tensor k{.dtype = DType::bf16, .shape = {batch, 5, 1, 8}};
  return work(make_explained({q, k, k}, {.causal = Causal::bottom_right}));
}

TEST(Work, sequences_that_are_alike_count_as_often_as_there_are) {
  // Rows see 3, 4 and 5 of 5 keys; 2 heads; 7 sequences.
  EXPECT_EQ(dense_work(7, 3).pairs, (3 + 4 + 5) * 2 * 7);
  EXPECT_EQ(dense_work(0, 3).pairs, 0);
}

TEST(Work, many_sequences_without_memory_take_no_time) {
  EXPECT_EQ(dense_work(std::int64_t{1} << 30, 0).pairs, 0);
  EXPECT_EQ(dense_work(std::int64_t{1} << 30, 3).pairs, 12 * 2 * (std::int64_t{1} << 30));
}

}  // namespace
}  // namespace narrows
