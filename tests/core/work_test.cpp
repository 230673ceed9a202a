// The IO model against counts by hand and by brute force.
#include "core/work.hpp"
#include "tests/core/call.hpp"

#include <random>

namespace narrows::test {
namespace {

TEST(Work, dense_forward_by_hand) {
  TestCall call = TestCall::dense(DType::bf16);
  const Work work = narrows::work(call.make());
  EXPECT_EQ(work.pairs, 2 * 4 * 5 * 7);
  EXPECT_EQ(work.flops, 2.0 * (8 + 6) * 280);
  const i64 q = 2 * 5 * 4 * 8 * 2, o = 2 * 5 * 4 * 6 * 2, k_and_v = 2 * 7 * 2 * (8 + 6) * 2, lse = 2 * 4 * 5 * 4;
  EXPECT_EQ(work.fused_bytes, q + o + k_and_v + lse);
  EXPECT_EQ(work.three_kernel_bytes, q + o + k_and_v + 4 * 280 * 2);
  EXPECT_EQ(work.three_kernel_memory, 2 * 280 * 2);
}

TEST(Work, window_counts_visible_pairs_and_the_keys_they_need) {
  TestCall call = TestCall::dense();
  call.out.lse = {};
  call.options.causal = Causal::bottom_right;
  call.options.window.left = 1;
  const Work work = narrows::work(call.make());
  // Queries stand at 2..6 and see two keys each: keys 1..6.
  EXPECT_EQ(work.pairs, 2 * 4 * 5 * 2);
  EXPECT_EQ(work.fused_bytes, 2 * 5 * 4 * (8 + 6) * 4 + 2 * 6 * 2 * (8 + 6) * 4);
  EXPECT_EQ(work.three_kernel_flops, 2.0 * (8 + 6) * 280);
}

TEST(Work, bias_and_mask_bytes_count_what_is_stored) {
  TestCall call = TestCall::dense();
  const i64 plain = narrows::work(call.make()).fused_bytes;
  call.options.bias = {call.memory.data(), DType::bf16, {2, 4, 5, 7}, {0, 35, 7, 1}, {}};
  call.options.mask = call.tensor({2, 1, 1, 7}, DType::boolean);
  call.options.sinks = call.tensor({4});
  EXPECT_EQ(narrows::work(call.make()).fused_bytes, plain + 4 * 5 * 7 * 2 + 2 * 7 + 4 * 4);
}

TEST(Work, backward_by_hand) {
  TestCall call = TestCall::dense();
  const BackwardInputs in{call.in.q, call.in.k, call.in.v, call.out.o, call.out.lse, call.tensor({2, 5, 4, 6}), {}};
  const Work work = narrows::work(make_backward(in, {}, {}));
  const i64 q = 2 * 5 * 4 * 8 * 4, o = 2 * 5 * 4 * 6 * 4, keys = 2 * 7 * 2 * (8 + 6) * 4, lse = 2 * 4 * 5 * 4;
  EXPECT_EQ(work.flops, 2.0 * (3 * 8 + 2 * 6) * 280);
  EXPECT_EQ(work.three_kernel_flops, 2.0 * (2 * 8 + 2 * 6) * 280);
  EXPECT_EQ(work.fused_bytes, 2 * q + 2 * keys + 2 * o + lse);
  EXPECT_EQ(work.three_kernel_bytes, 2 * q + 2 * keys + 2 * o + 7 * 280 * 4);
}

TEST(Work, varlen_equals_brute_force) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 200; ++trial) {
    TestCall call = TestCall::varlen();
    std::vector<std::int32_t> q{0}, k{0};
    for (int b = 0; b < 3; ++b) {
      q.push_back(std::min(10, q.back() + static_cast<int>(random() % 5)));
      k.push_back(std::min(14, k.back() + static_cast<int>(random() % 6)));
    }
    Ints bounds_q(q, {4}), bounds_k(k, {4});
    call.options.cu_seqlens_q = bounds_q;
    call.options.cu_seqlens_k = bounds_k;
    call.options.window = {static_cast<std::int64_t>(random() % 5) - 1, static_cast<std::int64_t>(random() % 5) - 1};
    call.options.chunk = random() % 4;
    const Call made = call.make();
    i64 pairs = 0;
    for (i64 b = 0; b < 3; ++b) {
      const Sequence s = sequence(made.problem, made.buffers, b);
      for (i64 i = 0; i < s.queries; ++i)
        for (i64 j = 0; j < s.keys; ++j) pairs += visible(made.problem.rules.mask, i + s.shift, j, s.keys);
    }
    EXPECT_EQ(work(made).pairs, 4 * pairs) << trial;
  }
}

TEST(Work, bounds_of_rows_are_counted) {
  TestCall call = TestCall::dense();
  // Rows stand at 2..6: they see keys 0..2, 2..3, none twice, and 3..6; of the second sequence one each.
  std::vector<std::int32_t> begins{-9, 2, 5, 6, 3, 0, 1, 2, 3, 4}, ends{3, 5, 5, 70, 90, 1, 2, 3, 4, 5};
  call.options.causal = Causal::bottom_right;
  call.options.key_begin = view(begins.data(), {2, 5});
  call.options.key_end = view(ends.data(), {2, 5});
  const Work both = work(call.make());
  EXPECT_EQ(both.pairs, 4 * ((3 + 2 + 0 + 0 + 4) + 5));
  // Keys from 0 to 6 of the first sequence, from 0 to 4 of the second.
  EXPECT_EQ(both.fused_bytes, 2 * 5 * 4 * (8 + 6) * 4 + (7 + 5) * 2 * (8 + 6) * 4 + 2 * 4 * 5 * 4);
  call.options.key_begin = view(begins.data() + 1, {2, 5}, {0, 0});
  call.options.key_end = {};
  EXPECT_EQ(work(call.make()).pairs, 2 * 4 * (1 + 2 + 3 + 4 + 5));
  call.options.key_begin = view(begins.data(), {2, 5}, {0, 1});
  EXPECT_EQ(work(call.make()).pairs, 2 * 4 * (3 + 2 + 0 + 0 + 4));
}

TEST(Work, one_bound_of_many_rows_takes_no_time) {
  const std::int64_t rows = std::int64_t{1} << 33;
  const Tensor tensor{nullptr, DType::fp32, {1, rows, 1, 64}, {0, 0, 0, 0}, {}};
  std::int32_t begin = 1 << 30, end = (1 << 30) + 3;
  Options options;
  options.key_begin = view(&begin, {1, rows}, {0, 0});
  options.key_end = view(&end, {1, rows}, {0, 0});
  options.window = {0, -1};
  EXPECT_EQ(work(make_explained({tensor, tensor, tensor}, options)).pairs, 3 * (i64{1} << 30) + 1 + 2 + 3);
}

TEST(Work, counts_saturate) {
  TestCall call;
  const std::int64_t rows = std::int64_t{1} << 33;
  const auto shape_only = [&](std::int64_t heads) {
    return Tensor{nullptr, DType::fp32, {1, rows, heads, 64}, {0, 0, 0, 0}, {}};
  };
  const Work work = narrows::work(make_explained({shape_only(8), shape_only(8), shape_only(8)}, {}));
  EXPECT_EQ(work.pairs, std::numeric_limits<i64>::max());
  EXPECT_EQ(work.three_kernel_memory, std::numeric_limits<i64>::max());
}

}  // namespace
}  // namespace narrows::test
