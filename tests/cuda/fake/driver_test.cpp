// What is asked of the driver, by the stand-in for it: contexts and their restoration, kernels loaded once a device, none
// while a stream is captured.
#include <latch>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <narrows/narrows.hpp>

#include "cuda/kernel.hpp"
#include "cuda/machine.hpp"
#include "cuda/tensor_map.hpp"
#include "tests/cuda/fake/driver.hpp"

namespace narrows::cuda {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST_F(FakeDriver, FactsOfADevice) {
  const DeviceFacts& facts = device_facts(1);
  EXPECT_EQ(facts.name, "second");
  EXPECT_EQ(facts.major, 9);
  EXPECT_EQ(facts.minor, 0);
  EXPECT_EQ(facts.multiprocessors, 132);
  EXPECT_EQ(facts.shared_bytes, 232448);
  EXPECT_EQ(facts.l2_bytes, 62914560);
  EXPECT_EQ(facts.memory_bytes, 151397597184);
  EXPECT_EQ(facts.clock_hertz, 1.98e9);
  EXPECT_EQ(facts.bytes_per_second, 4.9152e12);
  EXPECT_EQ(facts.driver_version, 13010);
  EXPECT_EQ(&device_facts(1), &facts);
  for (const int device : {-1, 2})
    EXPECT_THAT(error_of([&] { device_facts(device); }, ErrorCode::invalid_value), HasSubstr("2 CUDA devices"));
}

TEST_F(FakeDriver, ACallOnADeviceIsExplained) {
  const auto tensor = [](std::int64_t rows) {
    return Tensor{nullptr, DType::bf16, {2, rows, 4, 64}, {}, {DeviceKind::cuda, 1}};
  };
  const Explanation cost = explain({tensor(256), tensor(500), tensor(500)});
  EXPECT_EQ(cost.family, "sm90");
  const std::int64_t query_rows = 2 * 4 * 256, key_rows = 2 * 4 * 500, row = (64 + 64) * 2;
  EXPECT_EQ(cost.fused_bytes, (query_rows + key_rows) * row);
  EXPECT_EQ(cost.fused_l2_bytes, (query_rows + 2 * key_rows) * row);  // two blocks of queries
  EXPECT_EQ(cost.three_kernel_bytes, cost.fused_bytes + 4 * query_rows * 500 * 2);
  EXPECT_DOUBLE_EQ(cost.three_kernel_seconds, static_cast<double>(cost.three_kernel_bytes) / 4.9152e12);
  EXPECT_GT(cost.predicted_seconds, 0);
  EXPECT_THAT(cost.text(), HasSubstr("through L2    2.57 MB       -"));
}

TEST_F(FakeDriver, TheContextThatWasCurrentIsCurrentAfterwards) {
  const auto current = [] {
    Context context = nullptr;
    driver().cuCtxGetCurrent(&context);
    return context;
  };
  {
    const CurrentDevice zero(0);
    const Context of_zero = current();
    EXPECT_NE(of_zero, nullptr);
    {
      const CurrentDevice one(1);
      EXPECT_NE(current(), of_zero);
      {
        const CurrentDevice again(1);
        EXPECT_EQ(contexts(), 2);  // nothing was pushed: it is current
      }
      EXPECT_EQ(contexts(), 2);
    }
    EXPECT_EQ(current(), of_zero);
  }
  EXPECT_EQ(current(), nullptr);
  EXPECT_THROW(
      {
        const CurrentDevice zero(0);
        throw Error(ErrorCode::internal, "on the way");
      },
      Error);
  EXPECT_EQ(contexts(), 0);
  EXPECT_LE(state().retained, 2);
}

TEST_F(FakeDriver, AKernelIsLoadedOnceADevice) {
  const Program program = packed("once");
  const int before = state().loaded;
  std::latch start(16);
  std::vector<const Kernel*> found(16);
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < 16; ++i)
    threads.emplace_back([&, i] {
      start.arrive_and_wait();
      found[i] = &kernel(static_cast<int>(i % 2), {1, 2}, kStream, [&] { return program; });
    });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(state().loaded - before, 2);
  for (std::size_t i = 0; i < 16; ++i) EXPECT_EQ(found[i], found[i % 2]);
  EXPECT_EQ(found[0]->name, "forward_sm80 for sm_80");
  EXPECT_EQ(found[1]->name, "forward_sm80 for sm_90a");
  EXPECT_EQ(found[1]->device, 1);
  EXPECT_EQ(found[1]->shared_limit, 231424);
  EXPECT_EQ(resident_blocks(*found[0], 128, 4096), 3);
  const auto unwanted = []() -> Program { throw Error(ErrorCode::internal, "made again"); };
  EXPECT_EQ(&kernel(1, {1, 2}, kStream, unwanted), found[1]);
  EXPECT_THROW(kernel(1, {2, 1}, kStream, unwanted), Error);
  EXPECT_EQ(contexts(), 0);
}

TEST_F(FakeDriver, NothingIsLoadedWhileAStreamIsCaptured) {
  const Program program = packed("captured");
  const auto get = [&] { return &kernel(0, {3, 0}, kStream, [&] { return program; }); };
  const int before = state().loaded;
  state().capturing = 1;
  EXPECT_THAT(error_of(get, ErrorCode::invalid_value),
              HasSubstr("forward_sm80: would compile while the stream is being captured; call prepare"));
  state().capturing = 0;
  state().capturing_status = fake::kCaptureImplicit;
  error_of(get, ErrorCode::invalid_value);
  EXPECT_EQ(state().loaded, before);
  EXPECT_EQ(find_kernel(0, {3, 0}), nullptr);
  const Kernel* prepared = &load_kernel(0, {3, 0}, program);
  EXPECT_EQ(get(), prepared);
}

TEST_F(FakeDriver, ALaunchHandsOverItsArgument) {
  const Kernel& loaded = load_kernel(0, {4, 0}, packed("launched"));
  launch(loaded, {70000, 128, 4096}, kStream, 0x0807060504030201ll);
  EXPECT_THAT(state().launch, ElementsAre(70000u, 128u, 4096u));
  EXPECT_EQ(state().argument, std::string("\1\2\3\4\5\6\7\10"));
  EXPECT_THAT(error_of(
                  [&] {
                    launch(loaded, {1, 1, 0}, kStream, 'c');
                  },
                  ErrorCode::internal),
              HasSubstr("takes 8 bytes, but is given 1"));
  state().launch_status = fake::kFailure;
  EXPECT_THAT(
      error_of(
          [&] {
            launch(loaded, {9, 64, 5}, kStream, 0ll);
          },
          ErrorCode::internal),
      HasSubstr("CUDA_ERROR_NAME (its text) while launching forward_sm80 for sm_80 with 9 blocks of 64 threads"));
}

/// Attribute 6 of the driver's, programmatic stream serialization, on Hopper and of programs that wait for the kernel before.
TEST_F(FakeDriver, AProgramThatWaitsBeginsEarly) {
  u64 number = 0;
  for (const bool waits : {false, true})
    for (const int device : {0, 1}) {
      Program program = packed("early");
      program.begins_early = waits;
      launch(load_kernel(device, {9, number++}, program), {1, 32, 0}, kStream, 0ll);
      if (waits && device == 1)
        EXPECT_THAT(state().launch_attributes, ElementsAre(std::pair(6, 1)));
      else
        EXPECT_TRUE(state().launch_attributes.empty()) << "device " << device;
    }
}

/// A driver of CUDA 12.2 refuses the attribute while a stream is captured.
TEST(BeginningEarly, IsForHopperAndDriversThatCaptureIt) {
  DeviceFacts facts;
  for (const auto& [major, driver, early] :
       {std::tuple{8, 13000, false}, {9, 12020, false}, {9, 12030, true}, {10, 13000, true}}) {
    facts.major = major;
    facts.driver_version = driver;
    EXPECT_EQ(may_begin_early(facts), early) << "compute capability " << major << ", driver " << driver;
  }
}

/// Numbers of the driver's enumerations: fp16 6, bf16 9, swizzle of 128 bytes 3, promotion to 256 bytes 3.
TEST_F(FakeDriver, TheCopyEngineIsToldOfATensor) {
  std::byte memory{};
  const View view{&memory, DType::bf16, {9600, 1600, 320, 2}};
  const TensorMap map = tensor_map(view, {5, 6, 5, 72}, 176);
  EXPECT_EQ(map.bytes[127], 7);
  const fake::Map& told = state().map;
  EXPECT_EQ(told.address, &memory);
  EXPECT_THAT(told.options, ElementsAre(9, 0, 3, 3, 0));
  EXPECT_THAT(told.sizes, ElementsAre(72u, 6u, 5u, 5u));
  EXPECT_THAT(told.strides, ElementsAre(1600u, 320u, 9600u));
  EXPECT_THAT(told.box, ElementsAre(64u, 176u, 1u, 1u));
  EXPECT_THAT(told.steps, ElementsAre(1u, 1u, 1u, 1u));
  tensor_map({&memory, DType::fp16, {0, 320, 0, 2}}, {1, 6, 1, 64}, 64);
  EXPECT_EQ(told.options[0], 6);
  EXPECT_THAT(told.strides, ElementsAre(320u, 16u, 16u)) << "of one sequence and one head they mean nothing";
  state().map_status = fake::kFailure;
  EXPECT_THAT(error_of(
                  [&] {
                    tensor_map(view, {5, 6, 5, 72}, 64);
                  },
                  ErrorCode::internal),
              HasSubstr("describing a tensor of 5 x 6 x 5 x 72 elements to the copy engine"));
}

TEST_F(FakeDriver, MemoryGoesBackToItsStream) {
  const CurrentDevice current(0);
  {
    const DeviceMemory some(64, kStream), none(0, kStream);
    EXPECT_EQ(some.data(), reinterpret_cast<void*>(0x1040));
    EXPECT_EQ(none.data(), nullptr);
    EXPECT_EQ(state().allocated - state().freed, 1);
  }
  EXPECT_EQ(state().allocated, state().freed);
  state().allocation_status = fake::kOutOfMemory;
  EXPECT_THAT(error_of([] { const DeviceMemory much(1 << 30, kStream); }, ErrorCode::out_of_memory),
              HasSubstr("allocating 1073741824 bytes of device memory"));
}

}  // namespace
}  // namespace narrows::cuda
