// What is asked of the driver, by the stand-in for it: contexts and their restoration, kernels loaded once a device, none
// while a stream is captured.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <latch>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <narrows/narrows.hpp>

#include "core/error.hpp"
#include "cuda/cache.hpp"
#include "cuda/decode.hpp"
#include "cuda/driver.hpp"
#include "cuda/kernel.hpp"
#include "cuda/machine.hpp"
#include "cuda/tensor_map.hpp"
#include "plan/sm80_decode.hpp"
#include "plan/sm90.hpp"
#include "shared/cached_forward_args.h"
#include "tests/cuda/fake/state.hpp"
#include "tests/tools/files_support.hpp"

namespace narrows::cuda {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const Stream kStream = reinterpret_cast<Stream>(0x10);

/// The driver is found by its name where a library of that name is loaded already.
void* stand_in() {
  static void* const library = dlopen(NARROWS_FAKE_CUDA, RTLD_NOW);
  return library;
}

class FakeDriver : public testing::Test {
 protected:
  void SetUp() override {
    setenv("NARROWS_CACHE", "off", 1);
    ASSERT_NE(stand_in(), nullptr) << dlerror();
    ASSERT_NE(find_driver().functions, nullptr) << find_driver().absence;
    fake::State& fresh = state();
    fresh.capturing = fresh.capturing_status = fresh.launch_status = fresh.allocation_status = fresh.map_status = 0;
  }
  fake::State& state() { return *reinterpret_cast<decltype(&fake_state)>(dlsym(stand_in(), "fake_state"))(); }
  int contexts() { return reinterpret_cast<decltype(&fake_has_context)>(dlsym(stand_in(), "fake_has_context"))(); }

  /// A program that a pack has for both devices.
  Program packed(const std::string& config) { return packed({"forward_sm80.cu", "forward_sm80", config, false}); }
  Program packed(const Program& program) {
    std::vector<PackEntry> entries;
    for (const char* architecture : {"sm_80", "sm_90a"}) {
      Binary binary;
      binary.image = "an image";
      binary.function = program.function;
      binary.architecture = architecture;
      entries.push_back({cache().key(program, architecture), binary});
    }
    files::save(directory_ / "a.pack", pack_bytes(entries));
    load_pack((directory_ / "a.pack").string());
    return program;
  }

  files::TemporaryDirectory directory_;
};

std::string error_of(const std::function<void()>& body, ErrorCode code) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code);
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

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

/// Its tiles, grid and counter; what the copy engine was told last is O.
TEST_F(FakeDriver, ACallOnHopperIsLaunched) {
  const auto tensor = [](int number, DType dtype, const Dims& shape) {  // addresses of nothing
    return Tensor{reinterpret_cast<void*>(std::uintptr_t{1} << (24 + number)), dtype, shape, {}, {DeviceKind::cuda, 1}};
  };
  const Tensor q = tensor(1, DType::bf16, {4, 300, 24, 24}), k = tensor(2, DType::bf16, {4, 2100, 8, 24});
  const Outputs out{tensor(3, DType::bf16, {4, 300, 24, 24}), tensor(4, DType::fp32, {4, 24, 300})};
  Options options;
  options.causal = Causal::bottom_right;
  options.stream = kStream;
  const Call call = make_forward({q, k, k}, out, options);
  packed(forward_sm90_program(forward_sm90_constants(call.problem)));
  state().argument_bytes = sizeof(ForwardSm90Args);
  state().filled.clear();
  forward({q, k, k}, out, options);
  state().argument_bytes = fake::kArgumentBytes;
  // 2 blocks of 192 rows of 96 heads, by 12 warps that compute and 4 that bring.
  EXPECT_THAT(state().launch, ElementsAre(132u, 512u, static_cast<unsigned>(142160)));
  ForwardSm90Args args;
  ASSERT_EQ(state().argument.size(), sizeof args);
  std::memcpy(static_cast<void*>(&args), state().argument.data(), sizeof args);
  EXPECT_EQ(args.tiles, 192u);
  EXPECT_EQ(args.order.pairs, 96u);
  EXPECT_EQ(args.heads_divisor.value, 24u);
  EXPECT_EQ(args.group_divisor.value, 3u);
  EXPECT_EQ(args.blocks, 2);
  EXPECT_EQ(args.section, 96);
  EXPECT_EQ(args.group, 3);
  EXPECT_EQ(args.head_dim, 24);
  EXPECT_EQ(args.visibility.right, 0);
  EXPECT_EQ(args.o_map.bytes[0], 7);
  EXPECT_EQ(args.o.strides[1], 24 * 24 * 2);
  ASSERT_EQ(state().filled.size(), 1u) << "the counter alone";
  EXPECT_EQ(state().filled[0], std::make_pair(reinterpret_cast<unsigned long long>(args.tiles_taken), std::size_t{64}));
  EXPECT_THAT(state().map.sizes, ElementsAre(24u, 300u, 24u, 4u));
  EXPECT_THAT(state().map.box, ElementsAre(64u, 64u, 1u, 1u));

  options.causal = Causal::none;  // tiles of one length: no counter
  const Call whole = make_forward({q, k, k}, out, options);
  packed(forward_sm90_program(forward_sm90_constants(whole.problem)));
  state().argument_bytes = sizeof(ForwardSm90Args);
  state().filled.clear();
  forward({q, k, k}, out, options);
  state().argument_bytes = fake::kArgumentBytes;
  EXPECT_THAT(state().launch, ElementsAre(132u, 512u, static_cast<unsigned>(140624)));
  EXPECT_TRUE(state().filled.empty());
}

/// Addresses of nothing.
Tensor on_hopper(int number, DType dtype, const Dims& shape) {
  return {reinterpret_cast<void*>(std::uintptr_t{1} << (24 + number)), dtype, shape, {}, {DeviceKind::cuda, 1}};
}

/// Its boxes, and the call as kernels of caches have it.
TEST_F(FakeDriver, APromptOverPagesIsLaunched) {
  for (const bool padded : {false, true}) {
    const Tensor q = on_hopper(1, DType::bf16, {2, 300, 8, 128}), pool = on_hopper(2, DType::bf16, {50, 48, 2, 128});
    const Outputs out{on_hopper(3, DType::bf16, {2, 300, 8, 128}), on_hopper(4, DType::fp32, {2, 8, 300})};
    Options options;
    options.cache_seqlens = on_hopper(5, DType::int32, {2});
    options.block_table = on_hopper(6, DType::int32, {2, 20});
    if (padded) options.leftpad = on_hopper(7, DType::int32, {2});
    options.stream = kStream;
    options.family = "sm90";
    const Call call = make_forward({q, pool, pool}, out, options);
    packed(forward_sm90_program(forward_sm90_constants(call.problem)));
    state().argument_bytes = sizeof(CachedForwardArgs);
    forward({q, pool, pool}, out, options);
    state().argument_bytes = fake::kArgumentBytes;
    CachedForwardArgs args;
    ASSERT_EQ(state().argument.size(), sizeof args);
    std::memcpy(static_cast<void*>(&args), state().argument.data(), sizeof args);
    EXPECT_EQ(args.box_rows, padded ? 0 : 16) << "of 48 slots and 128 keys";
    EXPECT_EQ(args.boxes, padded ? 0 : 8);
    EXPECT_EQ(args.k_map.bytes[0] == 0, padded) << "the engine brings none";
    EXPECT_TRUE(args.cache.cached);
    EXPECT_EQ(args.cache.table, static_cast<const i32*>(options.block_table.data));
    EXPECT_EQ(args.cache.table_row, 20);
    EXPECT_EQ(args.cache.pages, 50);
    EXPECT_EQ(args.cache.capacity, 960);
    EXPECT_EQ(args.cache.by_page.divide(99).quotient, 2);
    EXPECT_EQ(args.cache.leftpad.data != nullptr, padded);
    EXPECT_EQ(args.cache.query_rows, 300);
    EXPECT_EQ(args.tiles, 3u * 2 * 8);
  }
}

/// A packed call that decodes, of so many sequences of a cache of 64 slots.
struct PackedDecode {
  Inputs in;
  Outputs out;
  Options options;

  explicit PackedDecode(std::int64_t batch, std::int64_t rows, std::int64_t heads = 8, std::int64_t kv_heads = 2) {
    in = {on_hopper(1, DType::bf16, {rows, heads, 128}), on_hopper(2, DType::bf16, {batch, 64, kv_heads, 128}),
          on_hopper(3, DType::bf16, {batch, 64, kv_heads, 128})};
    out = {on_hopper(4, DType::bf16, {rows, heads, 128}), on_hopper(5, DType::fp32, {heads, rows})};
    options.cu_seqlens_q = on_hopper(6, DType::int32, {batch + 1});
    options.cache_seqlens = on_hopper(7, DType::int32, {batch});
    options.stream = kStream;
    options.family = "sm80";
  }
  Call call() const { return make_forward(in, out, options); }
};

Plan decode_plan(const Call& call) {
  return std::get<Plan>(consider_sm80_decode(call.problem, work(call), machine(call.problem.device)));
}

TEST_F(FakeDriver, RowsOfNoSequenceAreLaunched) {
  const PackedDecode packed_call(0, 5);
  const Call call = packed_call.call();
  packed(decode_program(decode_constants(call.problem, decode_plan(call))));
  state().launch.clear();
  state().argument_bytes = sizeof(DecodeArgs);
  forward(packed_call.in, packed_call.out, packed_call.options);
  state().argument_bytes = fake::kArgumentBytes;
  DecodeArgs args;
  ASSERT_EQ(state().argument.size(), sizeof args);
  std::memcpy(static_cast<void*>(&args), state().argument.data(), sizeof args);
  EXPECT_EQ(args.query_rows, 5);
  EXPECT_EQ(args.cache_seqlens.data, nullptr) << "there is none to read ahead";
}

/// Numbers of a packed call's rows are bounded together, and not as if each sequence had all of them.
/// On the device: an address that nothing here looks at.
std::byte* scratch_address() { return reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40); }

TEST_F(FakeDriver, SequencesOfAPackedCallThatDecodes) {
  const Call call = PackedDecode(4096, 1 << 20, 32, 8).call();
  const DecodeArgs args = decode_args(call.problem, decode_plan(call), call.buffers, scratch_address());
  EXPECT_EQ(args.plain_filled, -1);
  EXPECT_EQ(args.by_rows.divisor, 1);
  EXPECT_EQ(args.by_sequence_rows.divisor, 1);
}

/// Marks are read where the appending kernel has written them.
TEST_F(FakeDriver, MarksOfRefusedSequences) {
  std::byte* const scratch = scratch_address();
  for (const std::int64_t rows : {0, 1}) {
    PackedDecode decode(2, 3);
    decode.options.block_table = on_hopper(8, DType::int32, {2, 4});
    decode.options.k_new = decode.options.v_new = on_hopper(9, DType::bf16, {2, rows, 2, 128});
    const Call call = decode.call();
    const Plan plan = decode_plan(call);
    const DecodeArgs args = decode_args(call.problem, plan, call.buffers, scratch);
    ASSERT_NE(args.outputs, nullptr);
    const i64 before =
        plan.workspace_bytes() - plan.workspace[static_cast<std::size_t>(Sm80DecodeRegion::refused)].bytes;
    EXPECT_EQ(args.refused, rows ? reinterpret_cast<i32*>(scratch + before) : nullptr);
  }
}

TEST_F(FakeDriver, NothingIsAppendedToNoHeads) {
  PackedDecode decode(2, 3, 0, 0);
  decode.options.k_new = decode.options.v_new = on_hopper(8, DType::bf16, {2, 1, 0, 128});
  state().launch.clear();
  forward(decode.in, decode.out, decode.options);
  EXPECT_TRUE(state().launch.empty());
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
