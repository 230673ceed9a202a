// Calls on a GPU: everything is checked but what device memory holds. Addresses of nothing stand for it: a read would crash.
#include "core/work.hpp"
#include "tests/core/call.hpp"

namespace narrows::test {
namespace {

constexpr Device kGpu{DeviceKind::cuda, 1};

void* nowhere(std::uintptr_t number) { return reinterpret_cast<void*>(number << 20); }

Tensor on_gpu(std::uintptr_t number, const Dims& shape, DType dtype = DType::fp16) {
  return {nowhere(number), dtype, shape, {}, kGpu};
}

Tensor ints(std::uintptr_t number, const Dims& shape) { return on_gpu(number, shape, DType::int32); }

struct GpuCall {
  Inputs in;
  Outputs out;
  Options options;

  /// q (2, 5, 4, 8), k (2, 7, 2, 8), v (2, 7, 2, 6).
  static GpuCall dense() {
    return {{on_gpu(1, {2, 5, 4, 8}), on_gpu(2, {2, 7, 2, 8}), on_gpu(3, {2, 7, 2, 6})},
            {on_gpu(4, {2, 5, 4, 6}), on_gpu(5, {2, 4, 5}, DType::fp32)},
            {}};
  }
  /// Three sequences in q (10, 4, 8), k (14, 2, 8), v (14, 2, 6).
  static GpuCall varlen() {
    GpuCall call{{on_gpu(1, {10, 4, 8}), on_gpu(2, {14, 2, 8}), on_gpu(3, {14, 2, 6})},
                 {on_gpu(4, {10, 4, 6}), on_gpu(5, {4, 10}, DType::fp32)},
                 {}};
    call.options.cu_seqlens_q = ints(6, {4});
    call.options.cu_seqlens_k = ints(7, {4});
    return call;
  }
  /// A cache of 3 rows of 16 slots for 2 sequences of one query.
  static GpuCall cached() {
    GpuCall call{{on_gpu(1, {2, 1, 4, 8}), on_gpu(2, {3, 16, 2, 8}), on_gpu(3, {3, 16, 2, 6})},
                 {on_gpu(4, {2, 1, 4, 6}), {}},
                 {}};
    call.options.cache_seqlens = ints(6, {2});
    call.options.cache_batch_idx = ints(7, {2});
    return call;
  }

  Call make() const { return make_forward(in, out, options); }
  std::string refusal() const { return refusal_of(*this); }
};

TEST(DeviceCall, dense_facts_are_exact) {
  GpuCall call = GpuCall::dense();
  call.options.causal = Causal::bottom_right;
  const Call made = call.make();
  EXPECT_EQ(made.problem.device, kGpu);
  EXPECT_FALSE(made.problem.lengths_on_device);
  EXPECT_EQ(made.problem.text(), "forward fp16 cuda:1 b=2 h=4 hk=2 sq=5 sk=7 d=8 dv=6 causal=bottom_right");
  EXPECT_EQ(work(made).pairs, 2 * 4 * (3 + 4 + 5 + 6 + 7));
  EXPECT_EQ(made.buffers.o.data, nowhere(4));
}

TEST(DeviceCall, bounds_of_rows_are_not_read) {
  GpuCall call = GpuCall::dense();
  call.options.causal = Causal::bottom_right;
  call.options.key_begin = ints(6, {2, 5});
  call.options.key_end = {nowhere(7), DType::int32, {2, 5}, {0, 3}, kGpu};
  const Call made = call.make();
  EXPECT_FALSE(made.problem.lengths_on_device);
  EXPECT_EQ(made.problem.text(),
            "forward fp16 cuda:1 b=2 h=4 hk=2 sq=5 sk=7 d=8 dv=6 causal=bottom_right key_begin key_end");
  EXPECT_EQ(work(made).pairs, 2 * 4 * (3 + 4 + 5 + 6 + 7));  // at most
  EXPECT_EQ(made.buffers.key_begin.data, nowhere(6));
  EXPECT_EQ(made.buffers.key_begin.row_stride, 5);
  EXPECT_EQ(made.buffers.key_end.stride, 3);
  EXPECT_EQ(made.buffers.key_end.row_stride, 0);
}

TEST(DeviceCall, varlen_lengths_are_bounds) {
  GpuCall call = GpuCall::varlen();
  call.options.seqused_k = {nowhere(8), DType::int32, {3}, {2}, kGpu};
  const Call made = call.make();
  EXPECT_TRUE(made.problem.lengths_on_device);
  EXPECT_EQ(made.problem.batch, 3);
  EXPECT_EQ(made.problem.max_queries, 10);
  EXPECT_EQ(made.problem.max_keys, 14);
  EXPECT_EQ(made.problem.text(), "forward fp16 cuda:1 b=3 h=4 hk=2 sq<=10 sk<=14 d=8 dv=6 q=varlen k=varlen");
  EXPECT_EQ(made.buffers.cu_seqlens_q.data, nowhere(6));
  EXPECT_EQ(made.buffers.seqused_k.data, nowhere(8));
  EXPECT_EQ(made.buffers.seqused_k.stride, 2);
  const Work most = work(made);
  EXPECT_EQ(most.pairs, 4 * 10 * 14);
  EXPECT_EQ(most.fused_bytes, 10 * 4 * (8 + 6) * 2 + 14 * 2 * (8 + 6) * 2 + 10 * 4 * 4);
}

TEST(DeviceCall, work_of_unknown_lengths_stays_within_window_and_chunk) {
  GpuCall call = GpuCall::varlen();
  call.options.window = {2, 1};
  EXPECT_EQ(work(call.make()).pairs, 4 * 10 * 4);
  call.options.window = {2, -1};
  EXPECT_EQ(work(call.make()).pairs, 4 * 10 * 14);
  call.options.chunk = 3;
  EXPECT_EQ(work(call.make()).pairs, 4 * 10 * 3);
  GpuCall decode = GpuCall::cached();
  decode.options.window = {4, 0};
  const Work work = narrows::work(decode.make());
  EXPECT_EQ(work.pairs, 4 * 2 * 5);
  EXPECT_EQ(work.fused_bytes, 2 * 4 * 8 * 2 + 2 * 5 * 2 * (8 + 6) * 2 + 2 * 4 * 6 * 2);
}

TEST(DeviceCall, unknown_lengths_hold_at_least_what_is_there) {
  const auto pairs = [](std::initializer_list<std::int32_t> q, std::initializer_list<std::int32_t> k, Window window) {
    TestCall call = TestCall::varlen();
    Ints queries(q), keys(k);
    call.options.cu_seqlens_q = queries;
    call.options.cu_seqlens_k = keys;
    call.options.window = window;
    return work(call.make()).pairs;
  };
  for (const Window window : {Window{}, Window{3, 0}, Window{0, 2}}) {
    GpuCall call = GpuCall::varlen();
    call.options.window = window;
    const i64 most = work(call.make()).pairs;
    EXPECT_LE(pairs({0, 10, 10, 10}, {0, 14, 14, 14}, window), most);
    EXPECT_LE(pairs({0, 3, 7, 10}, {0, 5, 9, 14}, window), most);
  }
}

TEST(DeviceCall, lengths_in_host_memory_are_refused_by_name) {
  const auto expect = [](GpuCall call, Tensor Options::*member, const Dims& shape, const std::string& name) {
    std::vector<std::int32_t> values(8, 0);
    call.options.*member = view(values.data(), shape);
    EXPECT_EQ(call.refusal(), name + ": cpu: must be on cuda:1 with the others");
  };
  expect(GpuCall::varlen(), &Options::cu_seqlens_q, {4}, "cu_seqlens_q");
  expect(GpuCall::varlen(), &Options::cu_seqlens_k, {4}, "cu_seqlens_k");
  expect(GpuCall::dense(), &Options::seqused_q, {2}, "seqused_q");
  expect(GpuCall::dense(), &Options::seqused_k, {2}, "seqused_k");
  expect(GpuCall::dense(), &Options::shift, {2}, "shift");
  expect(GpuCall::cached(), &Options::cache_seqlens, {2}, "cache_seqlens");
  expect(GpuCall::cached(), &Options::leftpad, {2}, "leftpad");
  TestCall call = TestCall::dense();
  call.options.shift = ints(6, {2});
  EXPECT_EQ(call.refusal(), "shift: cuda:1: must be on cpu with the others");
}

TEST(DeviceCall, shapes_and_dtypes_of_lengths) {
  GpuCall call = GpuCall::varlen();
  call.options.cu_seqlens_k = ints(7, {5});
  EXPECT_EQ(call.refusal(), "cu_seqlens_k: shape (5,): must be (b + 1) = (4,); nearest legal: (4,)");
  call.options.cu_seqlens_k = on_gpu(7, {4}, DType::int64);
  EXPECT_EQ(call.refusal(), "cu_seqlens_k: int64: must be int32; nearest legal: int32");
  call.options.cu_seqlens_k = {nullptr, DType::int32, {4}, {}, kGpu};
  EXPECT_EQ(call.refusal(), "cu_seqlens_k: null data: shape (4,) has elements");
  call = GpuCall::dense();
  call.in.q.dtype = call.in.k.dtype = call.in.v.dtype = DType::fp64;
  EXPECT_EQ(call.refusal(), "q: fp64: fp64 is for the CPU; nearest legal: fp32");
}

TEST(DeviceCall, masks_reach_what_the_host_knows) {
  GpuCall call = GpuCall::varlen();
  call.options.mask = on_gpu(8, {3, 2}, DType::boolean);
  Problem problem = call.make().problem;
  EXPECT_EQ(problem.score_rows, 3);
  EXPECT_EQ(problem.score_keys, 2);
  call.options.bias = on_gpu(9, {1, 1, 2, 1});
  problem = call.make().problem;
  EXPECT_EQ(problem.score_rows, 2);
  EXPECT_EQ(problem.score_keys, 2);
  call.options.mask = {};
  EXPECT_EQ(call.make().problem.score_keys, kMostRows);

  GpuCall mixed = GpuCall::dense();  // q (2, 5, ...), keys packed
  mixed.in.k = on_gpu(2, {14, 2, 8});
  mixed.in.v = on_gpu(3, {14, 2, 6});
  mixed.options.cu_seqlens_k = ints(7, {3});
  mixed.options.mask = on_gpu(8, {4, 2}, DType::boolean);
  EXPECT_EQ(
      mixed.refusal(),
      "mask: shape (4, 2): must broadcast to (b, h, sq, sk) = (2, 4, 5, 0); its sq axis is 4; nearest legal: 1 or "
      "5");
  mixed.options.mask = on_gpu(8, {5, 2}, DType::boolean);
  EXPECT_EQ(mixed.refusal(), "");
  mixed.options.mask = on_gpu(8, {4, 2}, DType::boolean);
  mixed.options.seqused_q = ints(10, {2});
  EXPECT_EQ(mixed.refusal(), "");

  GpuCall dense = GpuCall::dense();
  dense.options.seqused_k = ints(10, {2});
  dense.options.mask = on_gpu(8, {5, 6}, DType::boolean);
  EXPECT_EQ(
      dense.refusal(),
      "mask: shape (5, 6): must broadcast to (b, h, sq, sk) = (2, 4, 5, 7); its sk axis is 6; nearest legal: 1 or "
      "7");
}

TEST(DeviceCall, seed_and_offset_stay_where_they_are) {
  GpuCall call = GpuCall::dense();
  call.options.dropout = 0.5;
  call.options.seed = on_gpu(8, {1}, DType::int64);
  call.options.offset = on_gpu(9, {1}, DType::int64);
  const Call made = call.make();
  EXPECT_EQ(made.buffers.seed.place, nowhere(8));
  EXPECT_EQ(made.buffers.offset.place, nowhere(9));
  std::int64_t host = 3;
  call.options.seed = view(&host, {1});
  EXPECT_EQ(call.refusal(), "seed: cpu: must be on cuda:1 with the others");
}

TEST(DeviceCall, caches_are_checked_by_shape) {
  GpuCall call = GpuCall::cached();
  call.options.k_new = on_gpu(10, {2, 1, 2, 8});
  call.options.v_new = on_gpu(11, {2, 1, 2, 6});
  call.options.rotary_cos = on_gpu(12, {16, 4});
  call.options.rotary_sin = on_gpu(13, {16, 4});
  call.options.rotary_base = ints(14, {2});
  const Call made = call.make();
  EXPECT_TRUE(made.problem.appends);
  EXPECT_EQ(made.problem.max_keys, 16);
  EXPECT_EQ(made.problem.capacity, 16);
  EXPECT_EQ(made.problem.text(), "forward fp16 cuda:1 b=2 h=4 hk=2 sq<=1 sk<=16 d=8 dv=6 k=cache rotary=8 append");
  call.options.v_new = on_gpu(11, {2, 2, 2, 6});
  EXPECT_EQ(call.refusal(),
            "v_new: shape (2, 2, 2, 6): must be (b, s_new, hk, dv) = (2, 1, 2, 6); nearest legal: (2, "
            "1, 2, 6)");

  GpuCall paged = GpuCall::cached();
  paged.options.cache_batch_idx = {};
  paged.options.block_table = ints(7, {2, 5});
  const Problem problem = paged.make().problem;
  EXPECT_EQ(problem.max_keys, 5 * 16);
  EXPECT_EQ(problem.page_size, 16);
}

TEST(DeviceCall, status_stream_and_threads) {
  GpuCall call = GpuCall::dense();
  int stream = 0;
  call.options.stream = &stream;
  call.options.status = ints(8, {4});
  const Buffers buffers = call.make().buffers;
  EXPECT_EQ(buffers.stream, &stream);
  EXPECT_EQ(buffers.status, nowhere(8));
  call.options.status.strides = {2};
  EXPECT_EQ(call.refusal(), "status: strides (2,): must be 4 values without gaps; nearest legal: (1,)");
  call.options.status = {};
  call.options.threads = 3;
  EXPECT_EQ(call.refusal(), "threads: 3: are the CPU's, and the tensors are on cuda:1; nearest legal: 0");
  TestCall host = TestCall::dense();
  host.options.stream = &stream;
  EXPECT_EQ(host.refusal(), "stream: given: a call on the CPU has none; nearest legal: null");
}

}  // namespace
}  // namespace narrows::test
