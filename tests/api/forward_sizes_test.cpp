#include <narrows/narrows.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <vector>

namespace narrows {
namespace {

constexpr std::int64_t kMany = std::int64_t{1} << 31;

TEST(Forward, many_sequences_without_queries_or_heads_take_no_time) {
  for (const Dims& q : {Dims{kMany, 0, 1, 4}, Dims{kMany, 3, 0, 4}}) {
    const Tensor keys{.shape = {kMany, 0, q[2], 4}};
    EXPECT_NO_THROW(forward({Tensor{.shape = q}, keys, keys}, {.o = Tensor{.shape = q}}));
  }
}

TEST(Forward, rows_of_no_sequence_are_blank_even_without_any_sequence) {
  std::vector<float> q(6, 1), o(6, -1), lse(3, -1);
  std::vector<std::int32_t> bounds{0};
  const Tensor rows = view(q.data(), {3, 1, 2});
  const Tensor none{.shape = {0, 1, 2}};
  forward({rows, none, none}, {view(o.data(), {3, 1, 2}), view(lse.data(), {1, 3})},
          {.cu_seqlens_q = view(bounds.data(), {1}), .cu_seqlens_k = view(bounds.data(), {1})});
  EXPECT_EQ(o, std::vector<float>(6, 0));
  EXPECT_EQ(lse, std::vector<float>(3, -std::numeric_limits<float>::infinity()));
}

}  // namespace
}  // namespace narrows
