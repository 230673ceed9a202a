// The texts of refusals, exactly: users read them.
#include "tests/core/call.hpp"

#include <cmath>
#include <limits>

namespace narrows::test {
namespace {

TEST(Problem, dense_facts) {
  TestCall call = TestCall::dense(DType::bf16);
  call.options.causal = Causal::bottom_right;
  call.options.window.left = 3;
  const Call made = call.make();
  const Problem& problem = made.problem;
  EXPECT_EQ(problem.batch, 2);
  EXPECT_EQ(problem.heads, 4);
  EXPECT_EQ(problem.kv_heads, 2);
  EXPECT_EQ(problem.group(), 2);
  EXPECT_EQ(problem.head_dim, 8);
  EXPECT_EQ(problem.value_dim, 6);
  EXPECT_EQ(problem.max_queries, 5);
  EXPECT_EQ(problem.max_keys, 7);
  EXPECT_EQ(problem.rules.mask.left, 3);
  EXPECT_EQ(problem.rules.mask.right, 0);
  EXPECT_DOUBLE_EQ(problem.rules.scale, 1 / std::sqrt(8.0));
  EXPECT_EQ(problem.text(), "forward bf16 cpu b=2 h=4 hk=2 sq=5 sk=7 d=8 dv=6 causal=bottom_right window=(3, -1)");
  const Sequence s = sequence(problem, made.buffers, 1);
  EXPECT_EQ(s.queries, 5);
  EXPECT_EQ(s.keys, 7);
  EXPECT_EQ(s.shift, 2);
  EXPECT_EQ(s.key_batch, 1);
}

TEST(Problem, top_left_and_own_shift) {
  TestCall call = TestCall::dense();
  call.options.causal = Causal::top_left;
  Call made = call.make();
  EXPECT_EQ(sequence(made.problem, made.buffers, 0).shift, 0);
  Ints shift{-3, 11};
  call.options.shift = shift;
  EXPECT_EQ(call.refusal(),
            "shift: given: causal = top_left sets the shift to 0; use bottom_right with a shift of your own");
  call.options.causal = Causal::bottom_right;
  made = call.make();
  EXPECT_EQ(sequence(made.problem, made.buffers, 0).shift, -3);
  EXPECT_EQ(sequence(made.problem, made.buffers, 1).shift, 11);
}

TEST(Problem, bounds_of_rows) {
  TestCall call = TestCall::dense();
  std::vector<std::int32_t> values{0, 1, 2, 3, 4, 10, 11, 12, 13, 14};
  call.options.key_begin = view(values.data(), {2, 5});
  call.options.key_end = view(values.data() + 9, {2, 5}, {0, -2});
  Call made = call.make();
  EXPECT_EQ(made.problem.text(), "forward fp32 cpu b=2 h=4 hk=2 sq=5 sk=7 d=8 dv=6 key_begin key_end");
  const RowBounds second = sequence(made.problem, made.buffers, 1).bounds;
  EXPECT_EQ(second.begin, &values[5]);
  EXPECT_EQ(second.begin_stride, 1);
  EXPECT_EQ(second.end, &values[9]);
  EXPECT_EQ(second.end_stride, -2);

  call = TestCall::varlen();
  Ints bounds{0, 3, 3, 9};
  call.options.cu_seqlens_q = call.options.cu_seqlens_k = bounds;
  call.options.key_end = view(values.data(), {10});
  made = call.make();
  EXPECT_EQ(sequence(made.problem, made.buffers, 2).bounds.end, &values[3]);
  EXPECT_EQ(sequence(made.problem, made.buffers, 2).bounds.begin, nullptr);
  EXPECT_FALSE(sequence(TestCall::dense().make().problem, {}, 0).bounds.given());
}

TEST(Problem, bounds_of_rows_that_are_refused) {
  for (const bool begin : {true, false}) {
    const std::string name = begin ? "key_begin" : "key_end";
    const auto refusal = [&](TestCall call, const Tensor& bound) {
      (begin ? call.options.key_begin : call.options.key_end) = bound;
      return call.refusal();
    };
    TestCall memory;
    EXPECT_EQ(refusal(TestCall::dense(), memory.tensor({2, 5}, DType::int32)), "");
    EXPECT_EQ(refusal(TestCall::dense(), memory.tensor({2, 5}, DType::int64)),
              name + ": int64: must be int32; nearest legal: int32");
    EXPECT_EQ(refusal(TestCall::dense(), memory.tensor({5}, DType::int32)),
              name + ": shape (5,): must be (b, sq) = (2, 5); nearest legal: (2, 5)");
    EXPECT_EQ(refusal(TestCall::dense(), memory.tensor({1, 5}, DType::int32)),
              name + ": shape (1, 5): must be (b, sq) = (2, 5); nearest legal: (2, 5)");
    EXPECT_EQ(refusal(TestCall::dense(), memory.tensor({2, 7}, DType::int32)),
              name + ": shape (2, 7): must be (b, sq) = (2, 5); nearest legal: (2, 5)");
    EXPECT_EQ(refusal(TestCall::dense(), {nullptr, DType::int32, {2, 5}, {}, {}}),
              name + ": null data: shape (2, 5) has elements");
    EXPECT_EQ(refusal(TestCall::dense(), {memory.memory.data(), DType::int32, {2, 5}, {}, {DeviceKind::cuda, 1}}),
              name + ": cuda:1: must be on cpu with the others");
    TestCall varlen = TestCall::varlen();
    Ints bounds{0, 3, 3, 9};
    varlen.options.cu_seqlens_q = varlen.options.cu_seqlens_k = bounds;
    EXPECT_EQ(refusal(varlen, memory.tensor({9}, DType::int32)),
              name + ": shape (9,): must be (total_q) = (10,); nearest legal: (10,)");
  }
  TestCall call = TestCall::dense();
  call.options.key_begin = {call.lse_memory.data(), DType::int32, {2, 5}, {}, {}};
  EXPECT_EQ(call.refusal(), "lse: address of an input: must be memory of its own");
}

TEST(Problem, missing_tensors) {
  TestCall call = TestCall::dense();
  call.in.v = {};
  EXPECT_EQ(call.refusal(), "v: not given: this argument is required");
  call = TestCall::dense();
  call.in.k.data = nullptr;
  EXPECT_EQ(call.refusal(), "k: null data: shape (2, 7, 2, 8) has elements");
  call = TestCall::dense();
  call.out.o = {};
  EXPECT_EQ(call.refusal(), "o: not given: this argument is required");
}

TEST(Problem, dtypes) {
  TestCall call = TestCall::dense();
  call.in.k.dtype = DType::bf16;
  EXPECT_EQ(call.refusal(), "k: bf16: must be q's dtype; nearest legal: fp32");
  call = TestCall::dense();
  call.in.q.dtype = DType::uint8;
  EXPECT_EQ(call.refusal(), "q: uint8: must be fp16, bf16, fp32 or fp64 (fp8 comes later)");
  call = TestCall::dense(DType::bf16);
  call.out.lse.dtype = DType::bf16;
  EXPECT_EQ(call.refusal(), "lse: bf16: must be fp32 (fp64 for fp64 inputs); nearest legal: fp32");
  call = TestCall::dense();
  call.options.mask = call.tensor({7}, DType::uint8);
  EXPECT_EQ(call.refusal(),
            "mask: uint8: must be boolean, true = may attend; additive masks are bias; nearest legal: boolean");
  call = TestCall::dense();
  call.in.q.dtype = static_cast<DType>(99);
  EXPECT_EQ(call.refusal(), "q: 99: must be one of the dtypes of narrows::DType");
}

TEST(Problem, shapes) {
  TestCall call = TestCall::dense();
  call.in.q.shape = {10, 4, 8};
  EXPECT_EQ(call.refusal(),
            "q: shape (10, 4, 8): must have rank 4 (b, sq, h, d), or rank 3 (total_q, h, d) with cu_seqlens_q");
  call = TestCall::dense();
  call.in.k.shape = {2, 7, 3, 8};
  EXPECT_EQ(call.refusal(), "k: 3 kv heads: q's 4 heads must be a multiple of them; nearest legal: 2");
  call = TestCall::dense();
  call.in.k.shape = {2, 7, 2, 9};
  EXPECT_EQ(call.refusal(), "k: head dim 9: must be q's; nearest legal: 8");
  call = TestCall::dense();
  call.in.k.shape = {3, 7, 2, 8};
  EXPECT_EQ(call.refusal(), "k: shape (3, 7, 2, 8): must have q's batch, 2; nearest legal: 2");
  call = TestCall::dense();
  call.in.v.shape = {2, 6, 2, 6};
  EXPECT_EQ(
      call.refusal(),
      "v: shape (2, 6, 2, 6): must be k's shape but for the head dim = (2, 7, 2, 6); nearest legal: (2, 7, 2, 6)");
  call = TestCall::dense();
  call.out.o.shape = {2, 5, 4, 8};
  EXPECT_EQ(call.refusal(),
            "o: shape (2, 5, 4, 8): must be (b, sq, h, dv) = (2, 5, 4, 6); nearest legal: (2, 5, 4, 6)");
  call = TestCall::dense();
  call.in.q.shape = {2, -5, 4, 8};
  EXPECT_EQ(call.refusal(), "q: shape (2, -5, 4, 8): sizes must be >= 0; nearest legal: 0");
}

TEST(Problem, head_dims) {
  TestCall call = TestCall::dense();
  call.in.q.shape[3] = call.in.k.shape[3] = 0;
  EXPECT_EQ(call.refusal(), "q: head dim 0: must be in [1, 512], or 576; nearest legal: 1");
  call.in.q.shape[3] = call.in.k.shape[3] = 513;
  EXPECT_EQ(call.refusal(), "q: head dim 513: must be in [1, 512], or 576; nearest legal: 512");
}

TEST(Problem, C14_zero_sizes_are_ordinary) {
  for (const std::size_t axis : {0U, 1U}) {
    TestCall call = TestCall::dense();
    call.in.q.shape[axis] = call.out.o.shape[axis] = 0;
    call.out.lse.shape[axis == 0 ? 0 : 2] = 0;
    if (axis == 0) call.in.k.shape[0] = call.in.v.shape[0] = 0;
    EXPECT_EQ(call.refusal(), "") << axis;
  }
  TestCall call = TestCall::dense();
  call.in.q.shape[2] = call.in.k.shape[2] = call.in.v.shape[2] = call.out.o.shape[2] = call.out.lse.shape[1] = 0;
  call.in.q.data = call.in.k.data = call.in.v.data = call.out.o.data = call.out.lse.data = nullptr;
  EXPECT_EQ(call.refusal(), "");
  call.in.k.shape[2] = 3;
  call.in.k.data = call.memory.data();
  EXPECT_EQ(
      call.refusal(),
      "v: shape (2, 7, 0, 6): must be k's shape but for the head dim = (2, 7, 3, 6); nearest legal: (2, 7, 3, 6)");
  call = TestCall::dense();
  call.in.k.shape[2] = call.in.v.shape[2] = 0;
  EXPECT_EQ(call.refusal(), "k: 0 kv heads: q's 4 heads must be a multiple of them; nearest legal: 1");
}

TEST(Problem, memory) {
  TestCall call = TestCall::dense();
  call.in.q.strides = {1, 2, 3};
  EXPECT_EQ(call.refusal(), "q: strides (1, 2, 3): one stride for each axis of shape (2, 5, 4, 8)");
  call = TestCall::dense();
  call.in.q.shape = {std::int64_t{1} << 40, std::int64_t{1} << 40, 4, 8};
  EXPECT_EQ(call.refusal(), "q: shape (1099511627776, 1099511627776, 4, 8): the number of elements must be below 2^63");
  call = TestCall::dense();
  call.in.q.strides = {std::numeric_limits<std::int64_t>::min(), 1, 1, 1};
  EXPECT_EQ(call.refusal(), "q: strides (-9223372036854775808, 1, 1, 1): byte offsets must be below 2^63");
  call = TestCall::dense();
  call.in.v.data = reinterpret_cast<std::byte*>(call.memory.data()) + 2;
  EXPECT_EQ(call.refusal(), "v: data address: must be a multiple of the item size, 4");
  call = TestCall::dense();
  call.in.v.device = {DeviceKind::cuda, 1};
  EXPECT_EQ(call.refusal(), "v: cuda:1: must be on cpu with the others");
}

TEST(Problem, outputs_must_not_overlap) {
  TestCall call = TestCall::dense();
  call.out.o.strides = {120, 24, 0, 1};
  EXPECT_EQ(call.refusal(), "o: strides (120, 24, 0, 1): elements of an output must not share memory");
  call.out.o.strides = {120, 24, 5, 1};
  EXPECT_EQ(call.refusal(), "o: strides (120, 24, 5, 1): elements of an output must not share memory");
  call.out.o.strides = {4, 8, 40, 400};  // any order of axes is fine
  EXPECT_EQ(call.refusal(), "");
  call.out.o.strides = {-120, -24, -6, -1};
  EXPECT_EQ(call.refusal(), "");
  call = TestCall::dense();
  call.out.o.data = call.in.q.data;
  EXPECT_EQ(call.refusal(), "o: address of an input: must be memory of its own");
  call = TestCall::dense();
  call.out.lse.data = call.out.o.data;
  EXPECT_EQ(call.refusal(), "lse: address of o: must be memory of its own");
}

TEST(Problem, D16_stride_of_a_size_1_axis_means_nothing) {
  TestCall call = TestCall::dense();
  call.in.q.shape[0] = call.in.k.shape[0] = call.in.v.shape[0] = call.out.o.shape[0] = call.out.lse.shape[0] = 1;
  call.in.k.strides = {std::numeric_limits<std::int64_t>::max(), 16, 8, 1};
  call.out.o.strides = {0, 24, 6, 1};
  const Call made = call.make();
  EXPECT_EQ(made.buffers.k.strides[0], 0);
  EXPECT_EQ(made.buffers.o.strides[1], 24 * 4);
}

TEST(Problem, layouts) {
  TestCall call = TestCall::dense(DType::bf16);
  alignas(128) static std::array<std::byte, 4096> aligned{};
  call.in.q = {aligned.data(), DType::bf16, {2, 5, 4, 8}, {}, {}};
  call.in.k.strides = {0, 2, 14, 28};
  const Call made = call.make();
  EXPECT_TRUE(made.problem.q.unit_last);
  EXPECT_FALSE(made.problem.q.expanded);
  EXPECT_EQ(made.problem.q.alignment, 16);  // rows of 8 bf16
  EXPECT_EQ(made.problem.q.elements, 2 * 5 * 4 * 8);
  EXPECT_FALSE(made.problem.k.unit_last);
  EXPECT_TRUE(made.problem.k.expanded);
  EXPECT_EQ(made.problem.k.elements, 7 * 2 * 8);
}

TEST(Problem, numbers) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  TestCall call = TestCall::dense();
  call.options.scale = nan;
  EXPECT_EQ(call.refusal(), "scale: nan: must be finite");
  call.options.scale = -0.5;
  EXPECT_EQ(call.make().problem.rules.scale, -0.5);
  call.options.softcap = -1;
  EXPECT_EQ(call.refusal(), "softcap: -1: must be finite and >= 0 (0 = off); nearest legal: 0");
  call = TestCall::dense();
  call.options.chunk = -4;
  EXPECT_EQ(call.refusal(), "chunk: -4: must be >= 0 (0 = off); nearest legal: 0");
  call = TestCall::dense();
  call.options.threads = 2000;
  EXPECT_EQ(call.refusal(), "threads: 2000: must be in [0, 1024] (0 = every core); nearest legal: 1024");
  call = TestCall::dense();
  call.options.num_splits = -1;
  EXPECT_EQ(call.refusal(), "num_splits: -1: must be >= 0 (0 = the plan decides); nearest legal: 0");
}

TEST(Problem, E08_negative_windows_are_not_unlimited) {
  TestCall call = TestCall::dense();
  call.options.window = {-1, -3};
  EXPECT_EQ(call.refusal(), "window.right: -3: must be >= 0, or -1 for unlimited; nearest legal: -1");
  call.options.window = {-7, 0};
  EXPECT_EQ(call.refusal(), "window.left: -7: must be >= 0, or -1 for unlimited; nearest legal: -1");
  call.options.window = {-1, std::numeric_limits<std::int64_t>::max()};
  EXPECT_EQ(call.make().problem.rules.mask.right, kUnlimited);
}

TEST(Problem, dropout) {
  TestCall call = TestCall::dense();
  call.options.dropout = 1;
  EXPECT_EQ(call.refusal(), "dropout: 1: must be in [0, 1); nearest legal: 0.9999");
  call.options.dropout = 0.999999;
  EXPECT_EQ(call.refusal(), "dropout: 0.999999: keeps less than 1 of 65536 probabilities; nearest legal: 0.99998");
  call.options.dropout = 0.1;
  call.options.offset = std::uint64_t{1} << 32;
  EXPECT_EQ(call.refusal(), "offset: 4294967296: must be <= 4294967295; nearest legal: 4294967295");
  call.options.offset = 0;
  call.options.origin = {.h = 6, .H = 8};
  EXPECT_EQ(call.refusal(), "origin.H: 8: origin.h + h = 6 + 4 heads must fit in it; nearest legal: 10");
  call.options.origin = {.h = std::numeric_limits<std::int64_t>::max(), .H = 8};
  EXPECT_EQ(call.refusal(),
            "origin.H: 8: origin.h + h = 9223372036854775807 + 4 heads must fit in it; nearest legal: "
            "9223372036854775807");
  call.options.origin = {.b = -1};
  EXPECT_EQ(call.refusal(), "origin: (-1, 0, 0, 0, 0): (b, h, i, j, H) must be >= 0; nearest legal: 0");
  call.options.origin = {.b = std::int64_t{1} << 31};
  EXPECT_EQ(call.refusal(), "origin.b: 2147483648: (origin.b + b) * H must be <= 2^32, with H = 4; nearest legal: 0");
  call.options.dropout = 0;
  EXPECT_EQ(call.refusal(), "");  // without dropout no position is counted in 32 bits
}

TEST(Problem, I07_slopes_and_sinks_of_any_float_type) {
  for (const DType dtype : {DType::fp16, DType::bf16, DType::fp32, DType::fp64}) {
    TestCall call = TestCall::dense();
    call.options.alibi_slopes = call.tensor({2, 4}, dtype);
    call.options.sinks = call.tensor({4}, dtype);
    EXPECT_EQ(call.refusal(), "");
  }
  TestCall call = TestCall::dense();
  call.options.alibi_slopes = call.tensor({3});
  EXPECT_EQ(call.refusal(), "alibi_slopes: shape (3,): must be (h) = (4,); nearest legal: (4,)");
  call = TestCall::dense();
  call.options.sinks = call.tensor({4}, DType::int32);
  EXPECT_EQ(call.refusal(), "sinks: int32: must be fp16, bf16, fp32 or fp64; nearest legal: fp32");
}

TEST(Problem, I12_masks_broadcast_from_the_right) {
  for (const Dims& shape :
       {Dims{7}, Dims{5, 7}, Dims{1, 7}, Dims{4, 5, 7}, Dims{2, 1, 1, 7}, Dims{1}, Dims{2, 4, 5, 1}}) {
    TestCall call = TestCall::dense();
    call.options.mask = call.tensor(shape, DType::boolean);
    call.options.bias = call.tensor(shape, DType::bf16);
    EXPECT_EQ(call.refusal(), "") << to_text(shape);
  }
  TestCall call = TestCall::dense();
  call.options.mask = call.tensor({2, 1, 1, 7}, DType::boolean);
  EXPECT_EQ(call.make().buffers.mask.strides, (std::array<i64, 4>{7, 0, 0, 1}));
}

TEST(Problem, I15_masks_that_do_not_reach_are_refused) {
  TestCall call = TestCall::dense();
  call.options.mask = call.tensor({5, 6}, DType::boolean);
  EXPECT_EQ(
      call.refusal(),
      "mask: shape (5, 6): must broadcast to (b, h, sq, sk) = (2, 4, 5, 7); its sk axis is 6; nearest legal: 1 or 7");
  call.options.mask = {};
  call.options.bias = call.tensor({3, 1, 5, 7});
  EXPECT_EQ(call.refusal(),
            "bias: shape (3, 1, 5, 7): must broadcast to (b, h, sq, sk) = (2, 4, 5, 7); its b axis is 3; nearest "
            "legal: 1 or 2");
  call.options.bias = call.tensor({1, 2, 4, 5, 7});
  EXPECT_EQ(call.refusal(), "bias: shape (1, 2, 4, 5, 7): must have at most 4 axes (b, h, sq, sk)");
}

TEST(Problem, state_tensors) {
  TestCall call = TestCall::dense();
  call.options.workspace = call.tensor({64}, DType::fp32);
  EXPECT_EQ(call.refusal(), "workspace: fp32: must be uint8; nearest legal: uint8");
  call.options.workspace = {};
  call.options.status = call.tensor({3}, DType::int32);
  EXPECT_EQ(call.refusal(), "status: shape (3,): must be (code, sequence, value, limit) = (4,); nearest legal: (4,)");
}

TEST(Problem, backward) {
  TestCall call = TestCall::dense();
  call.options.bias = call.tensor({4, 5, 7});
  BackwardInputs in{call.in.q, call.in.k, call.in.v, call.out.o, call.out.lse, call.tensor({2, 5, 4, 6}), {}};
  Gradients out{.dq = {call.gradient_memory.data(), DType::fp32, {2, 5, 4, 8}, {}, {}}};
  const auto refusal = [&] {
    try {
      make_backward(in, out, call.options);
    } catch (const Error& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(refusal(), "");
  out.dbias = {call.gradient_memory.data() + 4096, DType::fp32, {5, 7}, {}, {}};
  EXPECT_EQ(refusal(), "dbias: shape (5, 7): must be bias's shape = (4, 5, 7); nearest legal: (4, 5, 7)");
  out.dbias = {};
  out.dsinks = {call.gradient_memory.data() + 4096, DType::fp32, {4}, {}, {}};
  EXPECT_EQ(refusal(), "dsinks: given: needs sinks");
  out.dsinks = {};
  in.dout.shape = {2, 5, 4, 8};
  EXPECT_EQ(refusal(), "dout: shape (2, 5, 4, 8): must be (b, sq, h, dv) = (2, 5, 4, 6); nearest legal: (2, 5, 4, 6)");
  in.dout.shape = {2, 5, 4, 6};
  out.dk = {call.gradient_memory.data(), DType::fp32, {2, 7, 2, 8}, {}, {}};
  EXPECT_EQ(refusal(), "dk: address of dq: must be memory of its own");
  out.dk.data = call.lse_memory.data();
  EXPECT_EQ(refusal(), "dk: address of an input: must be memory of its own");
  out.dk = {};
  in.dout.strides = {0, 0, 0, 0};  // G05: the gradient of sum() is expanded
  EXPECT_EQ(refusal(), "");
  Ints filled{3, 3};
  call.options.cache_seqlens = filled;
  EXPECT_EQ(refusal(), "backward: a cache call: cache calls are forward only");
}

}  // namespace
}  // namespace narrows::test
