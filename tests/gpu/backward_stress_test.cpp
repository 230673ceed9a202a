// Backward calls beside other work: hundreds of repeats bit for bit, threads and streams, and more heads than 16 bits count.
#include "cpu/reference.hpp"
#include "tests/gpu/device_call.hpp"
#include "tests/support/check.hpp"

#include <array>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

namespace narrows::test {
namespace {

using GpuStressBackward = GpuTest;
using GpuFamilyStressBackward = GpuFamilyTest;

void save_forward(Attention& a) {
  DeviceCall gpu(a.in(), a.out(), a.options);
  gpu.run();
  gpu.download();
}

struct Expected {
  Array dq, dk, dv;
};

Expected run_alone(Attention& a) {
  DeviceBackward gpu(a.backward_in(), a.gradients(), a.options);
  gpu.run();
  gpu.download();
  Expected bits{a.dq, a.dk, a.dv};
  for (Array* array : {&a.dq, &a.dk, &a.dv}) array->poison();
  return bits;
}

/// Runs and compares so often; the number of calls whose bits differed.
int repeat(Attention& a, const Expected& expected, void* stream, int times) {
  DeviceBackward gpu(a.backward_in(), a.gradients(), a.options);
  gpu.options.stream = stream;
  int different = 0;
  for (int time = 0; time < times; ++time) {
    gpu.run();
    gpu.download();
    different += !(a.dq.same_bits(expected.dq) && a.dk.same_bits(expected.dk) && a.dv.same_bits(expected.dv));
  }
  EXPECT_TRUE(gpu.surroundings_intact());
  return different;
}

Attention deterministic_call(const Sizes& sizes, DType dtype, std::uint64_t seed = 1,
                             std::string_view family = "sm80") {
  Attention a(sizes, dtype, seed);
  a.options.deterministic = true;
  a.options.family = family;
  return a;
}

/// Long rows, so that thread blocks drift apart and wait for each other; a second stream keeps the multiprocessors busy.
TEST_P(GpuFamilyStressBackward, three_hundred_repeats_beside_a_competing_stream) {
  for (const auto& [dtype, d] :
       {std::pair{DType::bf16, 128}, std::pair{DType::bf16, 256}, std::pair{DType::fp32, 128}}) {
    if (family() == "sm90" ? dtype == DType::fp32 : d == 256) continue;
    Attention a = deterministic_call({2, 700, 1500, 4, 2, d, d}, dtype, 1, family());
    a.options.causal = Causal::bottom_right;
    save_forward(a);
    const Expected expected = run_alone(a);
    std::atomic<bool> done = false;
    std::thread competitor([&] {
      const cuda::CurrentDevice current(0);
      const TestStream stream;
      Attention other = deterministic_call({4, 1000, 1000, 8, 8, 64, 64}, DType::bf16, 9, family());
      other.options.deterministic = false;
      save_forward(other);
      DeviceBackward gpu(other.backward_in(), other.gradients(), other.options);
      gpu.options.stream = stream.handle();
      while (!done) {
        for (int burst = 0; burst < 20; ++burst) gpu.run();
        stream.wait();
      }
    });
    const TestStream stream;
    EXPECT_EQ(repeat(a, expected, stream.handle(), dtype == DType::bf16 ? 300 : 60), 0);
    done = true;
    competitor.join();
  }
}

/// Key and value gradients are no sums of several thread blocks: their bits repeat without `deterministic` too.
TEST_P(GpuFamilyStressBackward, keys_repeat_without_turns_and_queries_stay_close) {
  Attention a = deterministic_call({2, 700, 1500, 4, 2, 64, 64}, DType::bf16, 1, family());
  save_forward(a);
  const Expected expected = run_alone(a);
  a.options.deterministic = false;
  DeviceBackward gpu(a.backward_in(), a.gradients(), a.options);
  for (int time = 0; time < 50; ++time) {
    gpu.run();
    gpu.download();
    ASSERT_TRUE(a.dk.same_bits(expected.dk) && a.dv.same_bits(expected.dv)) << time;
  }
  EXPECT_TRUE(backward_agrees(a.backward_in(), a.gradients(), a.options));
}

TEST_F(GpuStressBackward, eight_threads_on_four_streams) {
  constexpr int kThreads = 8;
  constexpr std::array kTypes{DType::bf16, DType::fp16, DType::fp32};
  std::array<std::unique_ptr<TestStream>, 4> streams;
  for (auto& stream : streams) stream = std::make_unique<TestStream>();
  std::vector<Attention> calls;
  std::vector<Expected> expected;
  for (int number = 0; number < kThreads; ++number) {
    const std::int64_t n = number;
    calls.push_back(deterministic_call({1 + n % 2, 60 + 37 * n, 90 + 41 * n, 4, 2, 32 + 24 * (n % 4), 64},
                                       kTypes[static_cast<std::size_t>(n % 3)], static_cast<std::uint64_t>(n + 1)));
    if (n % 2) calls.back().options.causal = Causal::bottom_right;
    save_forward(calls.back());
    expected.push_back(run_alone(calls.back()));
  }
  std::atomic<int> different = 0;
  std::vector<std::thread> threads;
  for (int number = 0; number < kThreads; ++number)
    threads.emplace_back([&, number] {
      const auto n = static_cast<std::size_t>(number);
      const cuda::CurrentDevice current(0);
      different += repeat(calls[n], expected[n], streams[n % streams.size()]->handle(), 40);
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(different, 0);
}

/// fp32, as GpuStressSizes' forward is: of so many short rows the plain computation hits one almost exactly.
TEST_F(GpuStressBackward, more_than_65535_heads_and_batch_rows) {
  for (const bool deterministic : {false, true}) {
    Attention a = deterministic_call({16400, 2, 5, 5, 5, 8, 8}, DType::fp32);
    a.options.deterministic = deterministic;
    reference::forward(a.in(), a.out(), a.options);
    DeviceBackward gpu(a.backward_in(), a.gradients(), a.options);
    gpu.run();
    gpu.download();
    EXPECT_TRUE(backward_agrees(a.backward_in(), a.gradients(), a.options));
    EXPECT_TRUE(gpu.surroundings_intact());
  }
}

/// One key each: P is 1, so that dV is dO, and dS, dQ and dK are 0.
TEST_F(GpuStressBackward, more_than_65535_sequences) {
  constexpr std::int64_t kSequences = 70000;
  std::vector<double> bounds(kSequences + 1);
  for (std::size_t s = 0; s < bounds.size(); ++s) bounds[s] = static_cast<double>(s);
  const Array cu = int32_array(bounds);
  Attention a = Attention::packed({1, kSequences, kSequences, 1, 1, 8, 8}, DType::bf16);
  a.options.cu_seqlens_q = a.options.cu_seqlens_k = cu;
  a.options.family = "sm80";
  save_forward(a);
  DeviceBackward gpu(a.backward_in(), a.gradients(), a.options);
  gpu.run();
  gpu.download();
  a.dv.for_each([&](const Dims& at) { ASSERT_EQ(a.dv[at], a.dout[at]) << "sequence " << at[0]; });
  for (const Array* array : {&a.dq, &a.dk})
    array->for_each([&](const Dims& at) { ASSERT_NEAR((*array)[at], 0, 1e-2) << "sequence " << at[0]; });
  EXPECT_EQ(gpu.status().code, 0);
}

INSTANTIATE_TEST_SUITE_P(All, GpuFamilyStressBackward, kGpuFamilies, family_name);

}  // namespace
}  // namespace narrows::test
