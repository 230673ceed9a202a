#include "tests/core/call.hpp"

namespace narrows::test {
namespace {

TEST(Lengths, varlen_facts) {
  TestCall call = TestCall::varlen();
  Ints q{0, 3, 3, 9}, k{0, 8, 9, 13}, used{8, 0, 2};
  call.options.cu_seqlens_q = q;
  call.options.cu_seqlens_k = k;
  call.options.seqused_k = used;
  const Call made = call.make();
  EXPECT_EQ(made.problem.batch, 3);
  EXPECT_EQ(made.problem.max_queries, 6);
  EXPECT_EQ(made.problem.max_keys, 8);
  const Sequence last = sequence(made.problem, made.buffers, 2);
  EXPECT_EQ(last.first_query, 3);
  EXPECT_EQ(last.queries, 6);
  EXPECT_EQ(last.first_key, 9);
  EXPECT_EQ(last.keys, 2);
  EXPECT_EQ(last.shift, -4);
  EXPECT_EQ(last.key_batch, 0);
  EXPECT_EQ(made.problem.text(), "forward fp32 cpu b=3 h=4 hk=2 sq=6 sk=8 d=8 dv=6 q=varlen k=varlen");
}

TEST(Lengths, bounds) {
  TestCall call = TestCall::varlen();
  Ints k{0, 8, 14};
  call.options.cu_seqlens_k = k;
  const auto with = [&](std::initializer_list<std::int32_t> values) {
    Ints q(values);
    call.options.cu_seqlens_q = q;
    return call.refusal();
  };
  EXPECT_EQ(with({0, 4, 10}), "");
  EXPECT_EQ(with({1, 4, 10}), "cu_seqlens_q[0]: 1: must be 0; nearest legal: 0");
  EXPECT_EQ(with({0, 4, 3}), "cu_seqlens_q[2]: 3: must be >= the bound before it, 4; nearest legal: 4");
  EXPECT_EQ(with({0, 4, 11}), "cu_seqlens_q[2]: 11: must be <= the tensor's rows, 10; nearest legal: 10");
  EXPECT_EQ(with({0, 10}), "cu_seqlens_k: shape (3,): must be (b + 1) = (2,); nearest legal: (2,)");
  EXPECT_EQ(with({}), "cu_seqlens_q: shape (0,): must be (b + 1); nearest legal: (1,)");
}

TEST(Lengths, dtype_and_device_of_bounds) {
  TestCall call = TestCall::varlen();
  Ints q{0, 4, 10}, k{0, 8, 14};
  call.options.cu_seqlens_q = q;
  call.options.cu_seqlens_k = k;
  call.options.cu_seqlens_k.dtype = DType::int64;
  EXPECT_EQ(call.refusal(), "cu_seqlens_k: int64: must be int32; nearest legal: int32");
  call.options.cu_seqlens_k = {};
  EXPECT_EQ(call.refusal(),
            "k: shape (14, 2, 8): must have rank 4 (b, sk, hk, d), or rank 3 (total_k, hk, d) with cu_seqlens_k");
}

TEST(Lengths, used) {
  TestCall call = TestCall::dense();
  Ints used{5, 6};
  call.options.seqused_q = used;
  EXPECT_EQ(call.refusal(), "seqused_q[1]: 6: must be in [0, 5], the length of sequence 1; nearest legal: 5");
  Ints negative{-1, 6};
  call.options.seqused_q = {};
  call.options.seqused_k = negative;
  EXPECT_EQ(call.refusal(), "seqused_k[0]: -1: must be in [0, 7], the length of sequence 0; nearest legal: 0");
}

TEST(Lengths, bounds_without_their_rank) {
  TestCall call = TestCall::dense();
  Ints k{0, 7, 14};
  call.options.cu_seqlens_k = k;
  EXPECT_EQ(call.refusal(), "cu_seqlens_k: given: needs k and v of rank 3");
  call.options.cu_seqlens_k = {};
  call.options.cu_seqlens_q = k;
  EXPECT_EQ(call.refusal(), "q: shape (2, 5, 4, 8): with cu_seqlens_q it must have rank 3, (total_q, h, d)");
}

TEST(Lengths, strided_int32) {
  TestCall call = TestCall::dense();
  std::vector<std::int32_t> values{5, 99, 2, 99};
  call.options.seqused_q = view(values.data(), {2}, {2});
  const Call made = call.make();
  EXPECT_EQ(sequence(made.problem, made.buffers, 0).queries, 5);
  EXPECT_EQ(sequence(made.problem, made.buffers, 1).queries, 2);
}

TEST(Lengths, masks_of_varlen_calls_reach_the_longest_sequence) {
  TestCall call = TestCall::varlen();
  Ints q{0, 4, 10}, k{0, 8, 14};
  call.options.cu_seqlens_q = q;
  call.options.cu_seqlens_k = k;
  call.options.mask = call.tensor({6, 8}, DType::boolean);
  EXPECT_EQ(call.refusal(), "");
  call.options.mask = call.tensor({9, 12}, DType::boolean);  // larger is fine: sequences index its corner
  EXPECT_EQ(call.refusal(), "");
  call.options.mask = call.tensor({6, 7}, DType::boolean);
  EXPECT_EQ(
      call.refusal(),
      "mask: shape (6, 7): must broadcast to (b, h, sq, sk) = (2, 4, 6, 8); its sk axis is 7; nearest legal: 1 or 8");
}

}  // namespace
}  // namespace narrows::test
