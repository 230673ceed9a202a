// Bytes between L2 and the multiprocessors, by hand and pair by pair.
#include <gtest/gtest.h>

#include <random>

#include "plan/traffic.hpp"
#include "tests/plan/gpu_plan.hpp"

namespace narrows::test {
namespace {

i64 bytes_of(const GpuSizes& sizes, const Options& options = {}) {
  const Call call = make_explained(sizes.inputs(), options);
  return l2_bytes(call, plan_of(call, cuda::machine_of("sm_90a")));
}

TEST(Traffic, by_hand) {
  // 2 * 4 heads of 300 rows of q and o; 3 blocks of 128 rows read 500 keys and values each.
  EXPECT_EQ(bytes_of(GpuSizes{}), 2 * 4 * (300 * (64 + 64) * 2 + 3 * 500 * (64 + 64) * 2));
  EXPECT_EQ(bytes_of(GpuSizes{.d = 40, .dv = 24}), 2 * 4 * (300 * (40 + 24) * 2 + 3 * 500 * (40 + 24) * 2));
  // fp32 keeps 64 rows a block.
  EXPECT_EQ(bytes_of(GpuSizes{.dtype = DType::fp32}), 2 * 4 * (300 * 128 * 4 + 5 * 500 * 128 * 4));
  // Rows stand at 200..499: the blocks see up to 328, 456 and 500 keys.
  EXPECT_EQ(bytes_of(GpuSizes{}, {.causal = Causal::bottom_right}),
            2 * 4 * (300 * 128 * 2 + (328 + 456 + 500) * 128 * 2));
  EXPECT_EQ(bytes_of(GpuSizes{.b = 0}), 0);
  Call with_lse = make_explained(GpuSizes{}.inputs(), {});
  with_lse.problem.wants_lse = true;
  EXPECT_EQ(l2_bytes(with_lse, plan_of(with_lse, cuda::machine_of("sm_90a"))), bytes_of(GpuSizes{}) + 2 * 4 * 300 * 4);
  EXPECT_EQ(bytes_of(GpuSizes{.sk = 0}), 2 * 4 * (300 * 128 * 2));
}

TEST(Traffic, keys_of_a_block_pair_by_pair) {
  std::mt19937 random(3);
  const auto below = [&](i64 limit) { return static_cast<i64>(random() % static_cast<unsigned>(limit)); };
  for (int trial = 0; trial < 200; ++trial) {
    const GpuSizes sizes{.b = 1, .sq = 1 + below(400), .sk = 1 + below(400), .h = 1, .hk = 1, .d = 8, .dv = 8};
    Options options;
    options.causal = static_cast<Causal>(below(3));
    options.window = {below(90) - 1, below(90) - 1};
    options.chunk = below(2) * (1 + below(70));
    const Call call = make_explained(sizes.inputs(), options);
    const Sequence s = sequence(call.problem, call.buffers, 0);
    i64 keys = 0;
    for (i64 first = 0; first < sizes.sq; first += 128)
      for (i64 j = 0; j < sizes.sk; ++j) {
        bool seen = false;
        for (i64 i = first; i < std::min(first + 128, sizes.sq); ++i)
          seen |= visible(call.problem.rules.mask, i + s.shift, j, s.keys);
        keys += seen;
      }
    EXPECT_EQ(bytes_of(sizes, options), (sizes.sq + keys) * (8 + 8) * 2) << trial;
  }
}

TEST(Traffic, at_most_where_only_the_device_knows_lengths) {
  Options options;
  options.seqused_k = on_gpu(DType::int32, {2});
  EXPECT_EQ(bytes_of(GpuSizes{}, options), bytes_of(GpuSizes{}));
  // A block of 128 rows with one key to the left of each sees 129; with chunks of 8, 2 * 7 more than its rows at most.
  const i64 others = 300 * 128 * 2;
  options.window = {1, 0};
  EXPECT_EQ(bytes_of(GpuSizes{}, options), 2 * 4 * (others + 3 * 129 * 128 * 2));
  options.window = {};
  options.chunk = 8;
  EXPECT_EQ(bytes_of(GpuSizes{}, options), 2 * 4 * (others + 3 * 142 * 128 * 2));

  // Packed, 300 rows may be cut into 300 / 128 + 2 + 1 blocks, and one sequence may have all 500 keys.
  Options packed;
  packed.cu_seqlens_q = packed.cu_seqlens_k = on_gpu(DType::int32, {3});
  const Inputs in{on_gpu(DType::bf16, {300, 4, 64}), on_gpu(DType::bf16, {500, 2, 64}),
                  on_gpu(DType::bf16, {500, 2, 64})};
  const Call call = make_explained(in, packed);
  EXPECT_EQ(l2_bytes(call, plan_of(call, cuda::machine_of("sm_90a"))), 4 * (others + 5 * 500 * 128 * 2));
}

TEST(Traffic, of_a_gpu_and_forward_alone) {
  Plan plan;
  plan.query_block = 128;
  EXPECT_EQ(l2_bytes(make_explained_backward(GpuSizes{}.inputs(), {}), plan), 0);
  const Tensor q{nullptr, DType::bf16, {1, 4, 2, 64}, {}, {}};
  EXPECT_EQ(l2_bytes(make_explained({q, q, q}, {}), plan), 0);
}

TEST(Traffic, is_a_line_where_it_was_counted) {
  Explanation explanation;
  explanation.fused_bytes = 1000;
  EXPECT_EQ(explanation.text().find("L2"), std::string::npos);
  explanation.fused_l2_bytes = 4500;
  EXPECT_NE(explanation.text().find("\nthrough L2    4.5 kB        -\n"), std::string::npos) << explanation.text();
}

}  // namespace
}  // namespace narrows::test
