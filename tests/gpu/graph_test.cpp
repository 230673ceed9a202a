// Captured calls: lengths are read when the graph runs, and nothing is compiled during a capture.
#include "tests/gpu/device_call.hpp"

#include <gmock/gmock.h>

namespace narrows::test {
namespace {

using GpuGraph = GpuTest;
using GpuFamilyGraph = GpuFamilyTest;

struct Varlen {
  Array cu_q = int32_array({0, 60, 131, 200}), cu_k = int32_array({0, 90, 150, 260}),
        used_k = int32_array({90, 60, 110});
  Attention a = Attention::packed({1, 200, 260, 2, 1, 64, 64}, DType::bf16);

  explicit Varlen(std::string_view family) {
    a.options.cu_seqlens_q = cu_q;
    a.options.cu_seqlens_k = cu_k;
    a.options.seqused_k = used_k;
    a.options.causal = Causal::bottom_right;
    a.options.family = family;
  }
};

TEST_P(GpuFamilyGraph, a_replay_reads_other_lengths) {
  Varlen call(family());
  const TestStream stream;
  DeviceCall gpu(call.a.in(), call.a.out(), call.a.options);
  gpu.options.stream = stream.handle();
  prepare(gpu.in, gpu.options);
  const Graph graph(stream, [&] { gpu.run(); });
  const std::vector<std::vector<double>> queries{{0, 60, 131, 200}, {0, 0, 7, 199}, {0, 200, 200, 200}};
  const std::vector<std::vector<double>> used{{90, 60, 110}, {1, 0, 110}, {90, 0, 3}};
  for (std::size_t x = 0; x < queries.size(); ++x) {
    for (std::int64_t i = 0; i < 4; ++i) call.cu_q.set({i}, queries[x][static_cast<std::size_t>(i)]);
    for (std::int64_t i = 0; i < 3; ++i) call.used_k.set({i}, used[x][static_cast<std::size_t>(i)]);
    gpu.upload(gpu.options.cu_seqlens_q);
    gpu.upload(gpu.options.seqused_k);
    call.a.o.poison();
    call.a.lse.poison();
    graph.replay(stream);
    gpu.download();
    EXPECT_EQ(gpu.status().code, 0);
    const Array o = call.a.o, lse = call.a.lse;
    call.a.o.poison();
    call.a.lse.poison();
    DeviceCall direct(call.a.in(), call.a.out(), call.a.options);
    direct.run();
    direct.download();
    EXPECT_TRUE(call.a.o.same_bits(o) && call.a.lse.same_bits(lse)) << "lengths " << x;
  }
  call.cu_q.set({3}, 201);
  gpu.upload(gpu.options.cu_seqlens_q);
  graph.replay(stream);
  stream.wait();
  EXPECT_EQ(gpu.status().code, 3);
  EXPECT_TRUE(gpu.surroundings_intact());
}

/// A program that no other test needs: fp16 and softcap alone, the head dims between two widths.
TEST_F(GpuGraph, a_capture_that_would_compile_fails_by_name_and_prepare_helps) {
  Attention a({1, 40, 50, 2, 1, 190, 100}, DType::fp16);
  a.options.softcap = 5;
  a.options.family = "sm80";
  const TestStream stream;
  DeviceCall gpu(a.in(), a.out(), a.options);
  gpu.options.stream = stream.handle();
  try {
    const Graph graph(stream, [&] { gpu.run(); });
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::HasSubstr("call prepare(problem) before the capture begins"));
  }
  prepare(gpu.in, gpu.options);
  const Graph graph(stream, [&] { gpu.run(); });
  graph.replay(stream);
  gpu.download();
  EXPECT_TRUE(std::isfinite(a.o[{0, 39, 1, 99}]));
}

TEST_P(GpuFamilyGraph, check_cannot_wait_during_a_capture) {
  Varlen call(family());
  const TestStream stream;
  DeviceCall gpu(call.a.in(), call.a.out(), call.a.options);
  gpu.options.stream = stream.handle();
  gpu.options.check = true;
  prepare(gpu.in, gpu.options);
  EXPECT_THROW(Graph(stream, [&] { gpu.run(); }), Error);
}

INSTANTIATE_TEST_SUITE_P(All, GpuFamilyGraph, kGpuFamilies, family_name);

}  // namespace
}  // namespace narrows::test
