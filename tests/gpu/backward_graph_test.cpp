// Captured backward calls: lengths are read when the graph runs, and nothing is compiled during a capture.
#include "tests/gpu/device_call.hpp"

#include <cmath>

#include <gmock/gmock.h>

namespace narrows::test {
namespace {

using GpuBackwardGraph = GpuTest;
using GpuFamilyBackwardGraph = GpuFamilyTest;

void fill_saved(Attention& a) {
  DeviceCall gpu(a.in(), a.out(), a.options);
  gpu.run();
  gpu.download();
}

TEST_P(GpuFamilyBackwardGraph, a_replay_reads_other_lengths) {
  Array cu_q = int32_array({0, 60, 131, 200}), used_k = int32_array({90, 60, 110});
  const Array cu_k = int32_array({0, 90, 150, 260});
  Attention a = Attention::packed({1, 200, 260, 2, 1, 64, 64}, DType::bf16);
  a.options.cu_seqlens_q = cu_q;
  a.options.cu_seqlens_k = cu_k;
  a.options.seqused_k = used_k;
  a.options.causal = Causal::bottom_right;
  a.options.deterministic = true;
  a.options.family = family();
  a.lse.fill(2);  // any saved results: both ways must make the same of them
  a.o.fill_gaussian(5);
  const TestStream stream;
  DeviceBackward gpu(a.backward_in(), a.gradients(), a.options);
  gpu.options.stream = stream.handle();
  prepare_backward({gpu.in.q, gpu.in.k, gpu.in.v}, gpu.options);
  const Graph graph(stream, [&] { gpu.run(); });
  const std::vector<std::vector<double>> queries{{0, 60, 131, 200}, {0, 0, 7, 199}, {0, 200, 200, 200}};
  const std::vector<std::vector<double>> used{{90, 60, 110}, {1, 0, 110}, {90, 0, 3}};
  for (std::size_t x = 0; x < queries.size(); ++x) {
    for (std::int64_t i = 0; i < 4; ++i) cu_q.set({i}, queries[x][static_cast<std::size_t>(i)]);
    for (std::int64_t i = 0; i < 3; ++i) used_k.set({i}, used[x][static_cast<std::size_t>(i)]);
    gpu.upload(gpu.options.cu_seqlens_q);
    gpu.upload(gpu.options.seqused_k);
    for (int repeat = 0; repeat < 2; ++repeat) {  // sums and turns of the replay before are not this one's
      graph.replay(stream);
      gpu.download();
    }
    EXPECT_EQ(gpu.status().code, 0);
    const Array dq = a.dq, dk = a.dk, dv = a.dv;
    for (Array* array : {&a.dq, &a.dk, &a.dv}) array->poison();
    DeviceBackward direct(a.backward_in(), a.gradients(), a.options);
    direct.run();
    direct.download();
    EXPECT_TRUE(a.dq.same_bits(dq) && a.dk.same_bits(dk) && a.dv.same_bits(dv)) << "lengths " << x;
    EXPECT_FALSE(std::isnan(a.dq[{0, 0, 0}]));
  }
  EXPECT_TRUE(gpu.surroundings_intact());
}

/// Programs that no other test needs: fp16 and softcap alone, the head dims between two widths.
TEST_F(GpuBackwardGraph, a_capture_that_would_compile_fails_by_name_and_prepare_helps) {
  Attention a({1, 40, 50, 2, 1, 190, 100}, DType::fp16);
  a.options.softcap = 6;
  a.options.family = "sm80";
  fill_saved(a);
  const TestStream stream;
  DeviceBackward gpu(a.backward_in(), a.gradients(), a.options);
  gpu.options.stream = stream.handle();
  try {
    const Graph graph(stream, [&] { gpu.run(); });
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("backward_"), testing::HasSubstr("prepare")));
  }
  prepare_backward({gpu.in.q, gpu.in.k, gpu.in.v}, gpu.options);
  const Graph graph(stream, [&] { gpu.run(); });
  graph.replay(stream);
  gpu.download();
  EXPECT_TRUE(std::isfinite(a.dq[{0, 39, 1, 189}]));
  EXPECT_TRUE(std::isfinite(a.dv[{0, 49, 0, 99}]));
}

/// Without a workspace the call's own scratch is part of the graph.
TEST_P(GpuFamilyBackwardGraph, a_graph_without_a_workspace) {
  Attention a({1, 90, 120, 2, 1, 64, 64}, DType::bf16);
  a.options.deterministic = true;
  a.options.family = family();
  fill_saved(a);
  const TestStream stream;
  DeviceBackward gpu(a.backward_in(), a.gradients(), a.options);
  gpu.run();
  gpu.download();
  const Array dq = a.dq, dk = a.dk;
  gpu.options.stream = stream.handle();
  gpu.options.workspace = {};
  const Graph graph(stream, [&] { backward(gpu.in, gpu.out, gpu.options); });
  for (int repeat = 0; repeat < 3; ++repeat) {
    a.dq.poison();
    graph.replay(stream);
    gpu.download();
    EXPECT_TRUE(a.dq.same_bits(dq) && a.dk.same_bits(dk));
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuFamilyBackwardGraph, kGpuFamilies, family_name);

}  // namespace
}  // namespace narrows::test
