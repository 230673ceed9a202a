// libcuda, opened when first asked for: what of it is used, declared here, so that no CUDA header is needed to build.
#pragma once

#include "core/types.hpp"

#include <cstddef>
#include <string>

namespace narrows::cuda {

using Status = int;  // 0 = done
using Context = struct ContextHandle*;
using Module = struct ModuleHandle*;
using Function = struct FunctionHandle*;
using Stream = struct StreamHandle*;  // null: the legacy default stream
using DevicePointer = u64;

inline constexpr int kOldestDriver = 12000;  // CUDA 12.0: the oldest NVRTC with C++20

/// The driver's CUlaunchAttribute, whose value is an int where we give one.
struct LaunchAttribute {
  int id = 0;
  alignas(8) int value = 0;
  std::byte rest[60] = {};
};
static_assert(sizeof(LaunchAttribute) == 72);

/// Its CUlaunchConfig.
struct LaunchConfig {
  unsigned blocks[3] = {1, 1, 1};
  unsigned threads[3] = {1, 1, 1};
  unsigned shared_bytes = 0;
  Stream stream = nullptr;
  const LaunchAttribute* attributes = nullptr;
  unsigned attribute_count = 0;
};
static_assert(sizeof(LaunchConfig) == 56);

/// The driver's functions, under its names for the same.
struct DriverFunctions {
  Status (*cuInit)(unsigned flags);
  Status (*cuDriverGetVersion)(int* version);
  Status (*cuGetErrorName)(Status, const char** name);
  Status (*cuGetErrorString)(Status, const char** text);
  Status (*cuDeviceGetCount)(int* count);
  Status (*cuDeviceGetName)(char* name, int size, int device);
  Status (*cuDeviceGetAttribute)(int* value, int attribute, int device);
  Status (*cuDeviceTotalMem)(std::size_t* bytes, int device);
  Status (*cuDevicePrimaryCtxRetain)(Context*, int device);
  Status (*cuCtxGetCurrent)(Context*);
  Status (*cuCtxPushCurrent)(Context);
  Status (*cuCtxPopCurrent)(Context*);
  Status (*cuModuleLoadData)(Module*, const void* image);
  Status (*cuModuleUnload)(Module);
  Status (*cuModuleGetFunction)(Function*, Module, const char* name);
  Status (*cuFuncGetAttribute)(int* value, int attribute, Function);
  Status (*cuFuncSetAttribute)(Function, int attribute, int value);
  Status (*cuFuncGetParamInfo)(Function, std::size_t index, std::size_t* offset,
                               std::size_t* bytes);  // null before 12.4
  Status (*cuOccupancyMaxActiveBlocksPerMultiprocessor)(int* blocks, Function, int threads, std::size_t shared_bytes);
  Status (*cuLaunchKernelEx)(const LaunchConfig*, Function, void** arguments, void** extra);
  Status (*cuTensorMapEncodeTiled)(void* map, int type, unsigned rank, void* address, const u64* sizes,
                                   const u64* strides, const unsigned* box, const unsigned* steps, int interleave,
                                   int swizzle, int promotion, int fill);
  Status (*cuMemAllocAsync)(DevicePointer*, std::size_t bytes, Stream);
  Status (*cuMemFreeAsync)(DevicePointer, Stream);
  Status (*cuMemsetD32Async)(DevicePointer, unsigned value, std::size_t words, Stream);
  Status (*cuMemcpyHtoDAsync)(DevicePointer, const void* from, std::size_t bytes, Stream);
  Status (*cuMemcpyDtoHAsync)(void* to, DevicePointer, std::size_t bytes, Stream);
  Status (*cuStreamIsCapturing)(Stream, int* status);
  Status (*cuStreamSynchronize)(Stream);
};

struct Driver {
  const DriverFunctions* functions = nullptr;  // null: absence says why
  std::string absence;
  int version = 0;  // of CUDA: 13000 is 13.0; known where libcuda is, even if there is no device
  int devices = 0;
};

/// Opens `library` and never closes it again.
Driver open_driver(const std::string& library);
/// libcuda.so.1, opened once. Throws nothing: a machine without CUDA is an ordinary one.
const Driver& find_driver();
/// Throws Error (not_implemented) with the absence.
const DriverFunctions& driver();
std::string version_text(int version);  // "13.0"

/// Throws Error (out_of_memory or internal): "CUDA_ERROR_NAME (the driver's text) while `doing`".
[[noreturn]] void fail(Status status, const std::string& doing);
/// The text is put together on failure alone.
template <class... Parts> void check(Status status, const Parts&... doing) {
  if (status != 0) fail(status, text(doing...));
}

struct DeviceFacts {
  int ordinal = 0;
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  i64 shared_bytes = 0;  // largest shared memory of a block that asks for it
  i64 l2_bytes = 0;
  i64 memory_bytes = 0;
  double clock_hertz = 0;       // maximum of the multiprocessors'
  double bytes_per_second = 0;  // of device memory, by its clock and width
  int driver_version = 0;
};
/// Read once a device. Throws Error where there is no such device.
const DeviceFacts& device_facts(int device);

/// Makes a device's primary context current in this thread, and what was current before current again.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  bool pushed_ = false;
};

/// Memory of the current device, in the order of a stream: there from the work enqueued next to the work enqueued last.
class DeviceMemory {
 public:
  DeviceMemory(i64 bytes, Stream stream);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  void* data() const { return data_; }  // null: of no bytes

 private:
  void* data_ = nullptr;
  Stream stream_;
};

// On the current device, in the order of the stream.
void clear(void* words, i64 bytes, Stream stream);  // whole 32-bit words
void copy_to_device(void* to, const void* from, i64 bytes, Stream stream);
void copy_to_host(void* to, const void* from, i64 bytes, Stream stream);
void synchronise(Stream stream);

/// Whether work enqueued now is recorded in a graph. Of the legacy stream: whether another's recording forbids its use.
bool is_capturing(Stream stream);

}  // namespace narrows::cuda
