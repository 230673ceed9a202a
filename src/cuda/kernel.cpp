#include "cuda/kernel.hpp"

#include "core/error.hpp"
#include "cuda/cache.hpp"
#include "cuda/compile.hpp"

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace narrows::cuda {
namespace {

enum FunctionAttribute : int { kSharedBytes = 1, kMaxDynamicSharedBytes = 8 };

/// CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, which drivers before 12.3 refuse while a stream is captured.
constexpr LaunchAttribute kBeginsEarly{6, 1};
constexpr int kFirstEarlyMajor = 9, kFirstEarlyDriver = 12030;

struct DeviceKey {
  int device;
  ProgramKey program;

  bool operator==(const DeviceKey&) const = default;
};

struct DeviceKeyHash {
  std::size_t operator()(const DeviceKey& key) const {
    u64 mixed = key.program.low * 0x9E3779B97F4A7C15ull + key.program.high;
    mixed = (mixed ^ mixed >> 32) * 0x9E3779B97F4A7C15ull + static_cast<u64>(key.device);
    return static_cast<std::size_t>(mixed ^ mixed >> 29);
  }
};

/// Never destroyed, nor is a module unloaded: the driver may be gone before.
struct Table {
  std::mutex loading;  // of one kernel at a time, beside which others are found and launched
  std::shared_mutex reading;
  std::unordered_map<DeviceKey, std::unique_ptr<const Kernel>, DeviceKeyHash> kernels;
};

Table& table() {
  static Table& all = *new Table;
  return all;
}

std::size_t argument_bytes(Function function) {
  std::size_t offset = 0, bytes = 0;
  if (!driver().cuFuncGetParamInfo || driver().cuFuncGetParamInfo(function, 0, &offset, &bytes) != 0) return 0;
  return bytes;
}

std::unique_ptr<const Kernel> load(int device, const Binary& binary, bool begins_early) {
  const CurrentDevice current(device);
  const DeviceFacts& facts = device_facts(device);
  auto kernel = std::make_unique<Kernel>();
  kernel->device = device;
  kernel->name = text(binary.function, " for ", binary.architecture);
  kernel->usage = binary.usage;
  Module module = nullptr;
  check(driver().cuModuleLoadData(&module, binary.image.data()), "loading ", kernel->name, " on cuda:", device);
  check(driver().cuModuleGetFunction(&kernel->function, module, binary.function.c_str()), "looking for the function ",
        kernel->name);
  int shared_bytes = 0;
  check(driver().cuFuncGetAttribute(&shared_bytes, kSharedBytes, kernel->function), "reading the size of ",
        kernel->name);
  kernel->shared_limit = facts.shared_bytes - shared_bytes;
  check(driver().cuFuncSetAttribute(kernel->function, kMaxDynamicSharedBytes, static_cast<int>(kernel->shared_limit)),
        "giving ", kernel->name, " all shared memory");
  kernel->argument_bytes = argument_bytes(kernel->function);
  kernel->begins_early = begins_early && may_begin_early(facts);
  return kernel;
}

}  // namespace

bool may_begin_early(const DeviceFacts& facts) {
  return facts.major >= kFirstEarlyMajor && facts.driver_version >= kFirstEarlyDriver;
}

const Kernel* find_kernel(int device, const ProgramKey& key) {
  Table& all = table();
  const std::shared_lock lock(all.reading);
  const auto found = all.kernels.find({device, key});
  return found == all.kernels.end() ? nullptr : found->second.get();
}

const Kernel& load_kernel(int device, const ProgramKey& key, const Program& program) {
  const DeviceFacts& facts = device_facts(device);
  const auto binary = cache().get(program, architecture(facts.major, facts.minor));
  Table& all = table();
  const std::lock_guard one(all.loading);
  if (const Kernel* loaded = find_kernel(device, key)) return *loaded;
  std::unique_ptr<const Kernel> kernel = load(device, *binary, program.begins_early);
  const std::unique_lock lock(all.reading);
  return *all.kernels.emplace(DeviceKey{device, key}, std::move(kernel)).first->second;
}

void require_no_capture(Stream stream, const Program& program) {
  if (is_capturing(stream))
    refuse_value("stream", program.function,
                 "would compile while the stream is being captured; call prepare(problem) before the capture begins");
}

int resident_blocks(const Kernel& kernel, int threads, i64 shared_bytes) {
  int blocks = 0;
  check(driver().cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel.function, threads,
                                                             static_cast<std::size_t>(shared_bytes)),
        "asking how many blocks of ", kernel.name, " fit");
  return blocks;
}

void launch(const Kernel& kernel, const Grid& grid, Stream stream, const void* argument, std::size_t bytes) {
  if (kernel.argument_bytes != 0 && kernel.argument_bytes != bytes)
    throw Error(ErrorCode::internal,
                text("cuda: ", kernel.name, " takes ", kernel.argument_bytes, " bytes, but is given ", bytes));
  void* parameters[] = {const_cast<void*>(argument)};
  const LaunchConfig config{.blocks = {grid.blocks, 1, 1},
                            .threads = {grid.threads, 1, 1},
                            .shared_bytes = grid.shared_bytes,
                            .stream = stream,
                            .attributes = &kBeginsEarly,
                            .attribute_count = kernel.begins_early ? 1u : 0u};
  check(driver().cuLaunchKernelEx(&config, kernel.function, parameters, nullptr), "launching ", kernel.name, " with ",
        grid.blocks, " blocks of ", grid.threads, " threads and ", grid.shared_bytes, " bytes of shared memory");
}

}  // namespace narrows::cuda
