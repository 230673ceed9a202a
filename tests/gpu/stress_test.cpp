// Calls beside each other: threads, streams, a device other than the current one, and a thousand repeats bit for bit.
#include "tests/gpu/device_call.hpp"

#include <array>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

namespace narrows::test {
namespace {

using GpuStress = GpuTest;
using GpuFamilyStress = GpuFamilyTest;

/// Calls that differ in size, type and rules, so that no two threads launch the same program all the time.
Attention call_number(int number) {
  constexpr std::array kTypes{DType::bf16, DType::fp16, DType::fp32};
  const std::int64_t n = number;
  Attention a({1 + n % 2, 60 + 37 * n, 90 + 41 * n, 4, 2, 32 + 24 * (n % 4), 64},
              kTypes[static_cast<std::size_t>(n % 3)], static_cast<std::uint64_t>(n + 1));
  a.options.family = "sm80";
  if (n % 2) a.options.causal = Causal::bottom_right;
  if (n % 4 == 2) a.options.dropout = 0.25;
  if (n % 4 == 3) a.options.softcap = 4;
  return a;
}

struct Expected {
  Array o, lse;
};

Expected run_alone(Attention& a) {
  DeviceCall gpu(a.in(), a.out(), a.options);
  gpu.run();
  gpu.download();
  Expected bits{a.o, a.lse};
  a.o.poison();
  a.lse.poison();
  return bits;
}

/// Runs and compares so often; the number of calls whose bits differed.
int repeat(Attention& a, const Expected& expected, void* stream, int times) {
  DeviceCall gpu(a.in(), a.out(), a.options);
  gpu.options.stream = stream;
  int different = 0;
  for (int time = 0; time < times; ++time) {
    gpu.run();
    gpu.download();
    different += !(a.o.same_bits(expected.o) && a.lse.same_bits(expected.lse));
  }
  EXPECT_TRUE(gpu.surroundings_intact());
  return different;
}

TEST_F(GpuStress, eight_threads_on_four_streams) {
  constexpr int kThreads = 8;
  std::array<std::unique_ptr<TestStream>, 4> streams;
  for (auto& stream : streams) stream = std::make_unique<TestStream>();
  std::vector<Attention> calls;
  std::vector<Expected> expected;
  for (int number = 0; number < kThreads; ++number) {
    calls.push_back(call_number(number));
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

TEST_F(GpuStress, threads_that_need_one_new_program_at_once) {
  std::vector<Attention> calls;
  for (int number = 0; number < 8; ++number) {
    calls.emplace_back(Sizes{1, 30, 50, 2, 1, 180, 60}, DType::fp16);
    calls.back().options.scale = -0.5;
    calls.back().options.family = "sm80";
  }
  std::vector<std::thread> threads;
  for (Attention& a : calls)
    threads.emplace_back([&a] {
      const cuda::CurrentDevice current(0);
      run_alone(a);
    });
  for (std::thread& thread : threads) thread.join();
  const Expected expected = run_alone(calls[0]);
  for (Attention& a : calls) EXPECT_EQ(repeat(a, expected, nullptr, 1), 0);
}

/// Long rows, so that warps drift apart; a second stream keeps the multiprocessors and L2 busy with other work.
TEST_P(GpuFamilyStress, a_thousand_repeats_beside_a_competing_stream) {
  for (const DType dtype : {DType::bf16, DType::fp32}) {
    if (family() == "sm90" && dtype == DType::fp32) continue;
    Attention a({2, 300, 1100, 4, 2, 128, 128}, dtype);
    a.options.causal = Causal::bottom_right;
    a.options.family = family();
    const Expected expected = run_alone(a);
    std::atomic<bool> done = false;
    std::thread competitor([&] {
      const cuda::CurrentDevice current(0);
      const TestStream stream;
      Attention other({8, 1000, 1000, 8, 8, 64, 64}, DType::bf16, 9);
      other.options.family = family();
      DeviceCall gpu(other.in(), other.out(), other.options);
      gpu.options.stream = stream.handle();
      while (!done) {
        for (int burst = 0; burst < 20; ++burst) gpu.run();
        stream.wait();
      }
    });
    const TestStream stream;
    EXPECT_EQ(repeat(a, expected, stream.handle(), dtype == DType::bf16 ? 1000 : 200), 0);
    done = true;
    competitor.join();
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuFamilyStress, kGpuFamilies, family_name);

TEST_F(GpuStress, the_current_device_stays) {
  const cuda::Context before = current_context();
  Attention a = call_number(1);
  run_alone(a);
  EXPECT_EQ(current_context(), before);
}

TEST_F(GpuStress, tensors_on_device_1_while_device_0_is_current) {
  if (cuda::find_driver().devices < 2) GTEST_SKIP() << "one GPU here";
  Attention a = call_number(1);
  const Expected expected = run_alone(a);
  std::optional<DeviceCall> gpu;
  {
    const cuda::CurrentDevice second(1);
    gpu.emplace(a.in(), a.out(), a.options);
    EXPECT_EQ(gpu->in.q.device.index, 1);
  }
  const cuda::Context before = current_context();
  forward(gpu->in, gpu->out, gpu->options);
  EXPECT_EQ(current_context(), before);
  const cuda::CurrentDevice second(1);
  gpu->download();
  EXPECT_TRUE(a.o.same_bits(expected.o) && a.lse.same_bits(expected.lse));
  EXPECT_EQ(gpu->status().code, 0);
  gpu.reset();
}

}  // namespace
}  // namespace narrows::test
