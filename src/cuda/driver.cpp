#include "cuda/driver.hpp"

#include "core/error.hpp"
#include "cuda/library.hpp"

#include <array>
#include <bit>
#include <memory>
#include <mutex>
#include <vector>

namespace narrows::cuda {
namespace {

constexpr Status kOutOfMemory = 2;
constexpr Status kNoDevice = 100;
constexpr Status kCaptureImplicit = 906;

enum Attribute : int {
  kClockRate = 13,  // kHz
  kMultiprocessors = 16,
  kMemoryClockRate = 36,  // kHz
  kMemoryBusWidth = 37,   // bits
  kL2Bytes = 38,
  kMajor = 75,
  kMinor = 76,
  kSharedBytesOptIn = 97,
};

/// The first function that `library` lacks, or null.
const char* find_functions(const Library& library, DriverFunctions& f) {
  const auto lacks = [&](const char* name, auto*& function) { return library.find(name, function) ? nullptr : name; };
  library.find("cuFuncGetParamInfo", f.cuFuncGetParamInfo);
  const std::array missing{
      lacks("cuInit", f.cuInit),
      lacks("cuDriverGetVersion", f.cuDriverGetVersion),
      lacks("cuGetErrorName", f.cuGetErrorName),
      lacks("cuGetErrorString", f.cuGetErrorString),
      lacks("cuDeviceGetCount", f.cuDeviceGetCount),
      lacks("cuDeviceGetName", f.cuDeviceGetName),
      lacks("cuDeviceGetAttribute", f.cuDeviceGetAttribute),
      lacks("cuDeviceTotalMem_v2", f.cuDeviceTotalMem),
      lacks("cuDevicePrimaryCtxRetain", f.cuDevicePrimaryCtxRetain),
      lacks("cuCtxGetCurrent", f.cuCtxGetCurrent),
      lacks("cuCtxPushCurrent_v2", f.cuCtxPushCurrent),
      lacks("cuCtxPopCurrent_v2", f.cuCtxPopCurrent),
      lacks("cuModuleLoadData", f.cuModuleLoadData),
      lacks("cuModuleUnload", f.cuModuleUnload),
      lacks("cuModuleGetFunction", f.cuModuleGetFunction),
      lacks("cuFuncGetAttribute", f.cuFuncGetAttribute),
      lacks("cuFuncSetAttribute", f.cuFuncSetAttribute),
      lacks("cuOccupancyMaxActiveBlocksPerMultiprocessor", f.cuOccupancyMaxActiveBlocksPerMultiprocessor),
      lacks("cuLaunchKernelEx", f.cuLaunchKernelEx),
      lacks("cuTensorMapEncodeTiled", f.cuTensorMapEncodeTiled),
      lacks("cuMemAllocAsync", f.cuMemAllocAsync),
      lacks("cuMemFreeAsync", f.cuMemFreeAsync),
      lacks("cuMemsetD32Async", f.cuMemsetD32Async),
      lacks("cuMemcpyHtoDAsync_v2", f.cuMemcpyHtoDAsync),
      lacks("cuMemcpyDtoHAsync_v2", f.cuMemcpyDtoHAsync),
      lacks("cuStreamIsCapturing", f.cuStreamIsCapturing),
      lacks("cuStreamSynchronize", f.cuStreamSynchronize)};
  for (const char* name : missing)
    if (name) return name;
  return nullptr;
}

std::string status_text(const DriverFunctions& functions, Status status) {
  const char* name = nullptr;
  const char* meaning = nullptr;
  functions.cuGetErrorName(status, &name);
  functions.cuGetErrorString(status, &meaning);
  return text(name ? name : "CUDA error " + std::to_string(status), " (", meaning ? meaning : "no text", ")");
}

/// Empty, or why the driver that was opened is of no use. Fills in what it learns on the way.
std::string start(const DriverFunctions& functions, Driver& found) {
  if (functions.cuDriverGetVersion(&found.version) != 0) return "the driver does not tell its version";
  if (found.version < kOldestDriver)
    return text("the driver is of CUDA ", version_text(found.version), "; Narrows needs ", version_text(kOldestDriver),
                " or later");
  if (const Status status = functions.cuInit(0); status != 0)
    return status == kNoDevice ? "no CUDA device" : text("the driver does not start: ", status_text(functions, status));
  if (const Status status = functions.cuDeviceGetCount(&found.devices); status != 0)
    return text("the driver does not count its devices: ", status_text(functions, status));
  return found.devices == 0 ? "no CUDA device" : "";
}

int attribute(int device, Attribute which) {
  int value = 0;
  check(driver().cuDeviceGetAttribute(&value, which, device), "reading a fact of cuda:", device);
  return value;
}

DeviceFacts read_facts(int device) {
  DeviceFacts facts;
  facts.ordinal = device;
  std::array<char, 256> name{};
  check(driver().cuDeviceGetName(name.data(), static_cast<int>(name.size()), device), "reading a device's name");
  facts.name = name.data();
  facts.major = attribute(device, kMajor);
  facts.minor = attribute(device, kMinor);
  facts.multiprocessors = attribute(device, kMultiprocessors);
  facts.shared_bytes = attribute(device, kSharedBytesOptIn);
  facts.l2_bytes = attribute(device, kL2Bytes);
  std::size_t bytes = 0;
  check(driver().cuDeviceTotalMem(&bytes, device), "reading a device's size of memory");
  facts.memory_bytes = static_cast<i64>(bytes);
  facts.clock_hertz = 1e3 * attribute(device, kClockRate);
  // Two transfers a cycle.
  facts.bytes_per_second = 2e3 * attribute(device, kMemoryClockRate) * (attribute(device, kMemoryBusWidth) / 8.0);
  facts.driver_version = find_driver().version;
  return facts;
}

/// What is asked of a device once. Never destroyed: the driver may be gone before.
struct DeviceState {
  std::once_flag facts_read, context_made;
  DeviceFacts facts;
  Context context = nullptr;
};

DeviceState& state_of(int device) {
  static const auto& states = *[] {
    auto* all = new std::vector<std::unique_ptr<DeviceState>>;
    for (int i = 0; i < find_driver().devices; ++i) all->push_back(std::make_unique<DeviceState>());
    return all;
  }();
  driver();
  if (device < 0 || device >= find_driver().devices)
    refuse_value("device", text("cuda:", device), text("this machine has ", find_driver().devices, " CUDA devices"),
                 text("cuda:", device < 0 ? 0 : find_driver().devices - 1));
  return *states[static_cast<std::size_t>(device)];
}

Context primary_context(int device) {
  DeviceState& state = state_of(device);
  std::call_once(state.context_made,
                 [&] { check(driver().cuDevicePrimaryCtxRetain(&state.context, device), "opening cuda:", device); });
  return state.context;
}

DevicePointer address(const void* pointer) { return std::bit_cast<std::uintptr_t>(pointer); }

}  // namespace

Driver open_driver(const std::string& name) {
  Driver found;
  std::string reason;
  const Library library(name, reason);
  if (!library) {
    found.absence = reason.find("No such file") == std::string::npos ? reason : name + ": not found";
    return found;
  }
  auto functions = std::make_unique<DriverFunctions>();
  if (const char* missing = find_functions(library, *functions)) {
    found.absence =
        text(name, ": has no ", missing, "; Narrows needs a driver of CUDA ", version_text(kOldestDriver), " or later");
    return found;
  }
  found.absence = start(*functions, found);
  if (found.absence.empty()) found.functions = functions.release();
  return found;
}

const Driver& find_driver() {
  static const Driver& found = *new Driver(open_driver("libcuda.so.1"));
  return found;
}

const DriverFunctions& driver() {
  const Driver& found = find_driver();
  if (!found.functions) throw Error(ErrorCode::not_implemented, "cuda: " + found.absence);
  return *found.functions;
}

std::string version_text(int version) { return text(version / 1000, ".", version % 1000 / 10); }

void fail(Status status, const std::string& doing) {
  throw Error(status == kOutOfMemory ? ErrorCode::out_of_memory : ErrorCode::internal,
              text("cuda: ", status_text(driver(), status), " while ", doing));
}

const DeviceFacts& device_facts(int device) {
  DeviceState& state = state_of(device);
  std::call_once(state.facts_read, [&] { state.facts = read_facts(device); });
  return state.facts;
}

CurrentDevice::CurrentDevice(int device) {
  const Context wanted = primary_context(device);
  Context current = nullptr;
  check(driver().cuCtxGetCurrent(&current), "asking for the current device");
  if (current == wanted) return;
  check(driver().cuCtxPushCurrent(wanted), "making cuda:", device, " current");
  pushed_ = true;
}

CurrentDevice::~CurrentDevice() {
  Context popped = nullptr;
  if (pushed_) driver().cuCtxPopCurrent(&popped);
}

DeviceMemory::DeviceMemory(i64 bytes, Stream stream) : stream_(stream) {
  if (bytes == 0) return;
  DevicePointer allocated = 0;
  check(driver().cuMemAllocAsync(&allocated, static_cast<std::size_t>(bytes), stream), "allocating ", bytes,
        " bytes of device memory");
  data_ = std::bit_cast<void*>(static_cast<std::uintptr_t>(allocated));
}

DeviceMemory::~DeviceMemory() {
  if (data_) driver().cuMemFreeAsync(address(data_), stream_);
}

void clear(void* words, i64 bytes, Stream stream) {
  check(driver().cuMemsetD32Async(address(words), 0, static_cast<std::size_t>(bytes) / sizeof(u32), stream),
        "clearing ", bytes, " bytes of device memory");
}

void copy_to_device(void* to, const void* from, i64 bytes, Stream stream) {
  check(driver().cuMemcpyHtoDAsync(address(to), from, static_cast<std::size_t>(bytes), stream), "copying ", bytes,
        " bytes to the device");
}

void copy_to_host(void* to, const void* from, i64 bytes, Stream stream) {
  check(driver().cuMemcpyDtoHAsync(to, address(from), static_cast<std::size_t>(bytes), stream), "copying ", bytes,
        " bytes from the device");
}

void synchronise(Stream stream) { check(driver().cuStreamSynchronize(stream), "waiting for a stream"); }

bool is_capturing(Stream stream) {
  int status = 0;
  const Status outcome = driver().cuStreamIsCapturing(stream, &status);
  if (outcome == kCaptureImplicit) return true;
  check(outcome, "asking whether a stream is being captured");
  return status != 0;
}

}  // namespace narrows::cuda
