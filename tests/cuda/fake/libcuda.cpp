// A libcuda.so.1 of two devices that computes nothing, so that what is asked of the driver is tested where there is no GPU.
#include <array>
#include <cstring>

#include "cuda/driver.hpp"
#include "tests/cuda/fake/state.hpp"

using narrows::cuda::Context;
using narrows::cuda::DevicePointer;
using narrows::cuda::Function;
using narrows::cuda::LaunchConfig;
using narrows::cuda::Module;
using narrows::cuda::Stream;
using narrows::fake::kDevices;

namespace {

std::array<char, kDevices> contexts;
thread_local std::vector<Context> pushed;
char something;

narrows::fake::State& state() { return *fake_state(); }

}  // namespace

extern "C" {

narrows::fake::State* fake_state() {
  static narrows::fake::State only;
  return &only;
}
int fake_has_context() { return static_cast<int>(pushed.size()); }

int cuInit(unsigned) { return 0; }
int cuDriverGetVersion(int* version) {
  *version = 13010;
  return 0;
}
int cuGetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_NAME";
  return 0;
}
int cuGetErrorString(int, const char** text) {
  *text = "its text";
  return 0;
}
int cuDeviceGetCount(int* count) {
  *count = kDevices;
  return 0;
}
int cuDeviceGetName(char* name, int size, int device) {
  std::strncpy(name, device == 0 ? "first" : "second", static_cast<std::size_t>(size));
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {
    case 13: *value = 1980000; return 0;
    case 16: *value = 132; return 0;
    case 36: *value = 3200000; return 0;
    case 37: *value = 6144; return 0;
    case 38: *value = 60 << 20; return 0;
    case 75: *value = device == 0 ? 8 : 9; return 0;
    case 76: *value = 0; return 0;
    case 97: *value = 227 << 10; return 0;
    default: return narrows::fake::kFailure;
  }
}
int cuDeviceTotalMem_v2(std::size_t* bytes, int) {
  *bytes = std::size_t{141} << 30;
  return 0;
}
int cuDevicePrimaryCtxRetain(Context* context, int device) {
  ++state().retained;
  *context = reinterpret_cast<Context>(&contexts[static_cast<std::size_t>(device)]);
  return 0;
}
int cuCtxGetCurrent(Context* context) {
  *context = pushed.empty() ? nullptr : pushed.back();
  return 0;
}
int cuCtxPushCurrent_v2(Context context) {
  pushed.push_back(context);
  return 0;
}
int cuCtxPopCurrent_v2(Context* context) {
  if (pushed.empty()) return narrows::fake::kFailure;
  *context = pushed.back();
  pushed.pop_back();
  return 0;
}
int cuModuleLoadData(Module* module, const void*) {
  ++state().loaded;
  state().loaded_in = pushed.empty() ? nullptr : pushed.back();
  *module = reinterpret_cast<Module>(&something);
  return 0;
}
int cuModuleUnload(Module) { return 0; }
int cuModuleGetFunction(Function* function, Module, const char*) {
  *function = reinterpret_cast<Function>(&something);
  return 0;
}
int cuFuncGetAttribute(int* value, int, Function) {
  *value = 1024;
  return 0;
}
int cuFuncSetAttribute(Function, int attribute, int value) {
  return attribute == 8 && value == (226 << 10) ? 0 : narrows::fake::kFailure;
}
int cuFuncGetParamInfo(Function, std::size_t, std::size_t* offset, std::size_t* bytes) {
  *offset = 0;
  *bytes = state().argument_bytes;
  return 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Function, int threads, std::size_t shared_bytes) {
  *blocks = threads == 128 && shared_bytes == 4096 ? 3 : 0;
  return 0;
}
int cuLaunchKernelEx(const LaunchConfig* config, Function, void** arguments, void**) {
  state().launch = {config->blocks[0], config->threads[0], config->shared_bytes};
  state().launch_attributes.clear();
  for (unsigned i = 0; i < config->attribute_count; ++i)
    state().launch_attributes.emplace_back(config->attributes[i].id, config->attributes[i].value);
  state().argument.assign(static_cast<const char*>(arguments[0]), state().argument_bytes);
  return state().launch_status;
}
int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const unsigned long long* sizes,
                           const unsigned long long* strides, const unsigned* box, const unsigned* steps,
                           int interleave, int swizzle, int promotion, int fill) {
  std::memset(map, 7, 128);
  state().map = {address,
                 {type, interleave, swizzle, promotion, fill},
                 {sizes, sizes + rank},
                 {strides, strides + rank - 1},
                 {box, box + rank},
                 {steps, steps + rank}};
  return state().map_status;
}
int cuMemAllocAsync(DevicePointer* pointer, std::size_t bytes, Stream) {
  if (state().allocation_status != 0) return state().allocation_status;
  ++state().allocated;
  *pointer = 0x1000 + bytes;
  return 0;
}
int cuMemFreeAsync(DevicePointer, Stream) {
  ++state().freed;
  return 0;
}
int cuMemsetD32Async(DevicePointer to, unsigned, std::size_t words, Stream) {
  state().filled.emplace_back(to, words * sizeof(unsigned));
  return 0;
}
int cuMemcpyHtoDAsync_v2(DevicePointer, const void*, std::size_t, Stream) { return 0; }
int cuMemcpyDtoHAsync_v2(void*, DevicePointer, std::size_t, Stream) { return 0; }
int cuStreamIsCapturing(Stream, int* status) {
  *status = state().capturing;
  return state().capturing_status;
}
int cuStreamSynchronize(Stream) { return 0; }
}
