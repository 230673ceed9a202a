#include "tests/gpu/device.hpp"

#include "core/error.hpp"
#include "cuda/library.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

namespace narrows::test {
namespace {

using cuda::check;
using cuda::DevicePointer;
using cuda::Status;
using cuda::Stream;

// As the driver declares them.
struct Location {
  int type = 1;  // a device
  int id = 0;
};
struct AllocationProperties {
  int type = 1;  // not movable
  int handle_types = 0;
  Location location;
  void* unused = nullptr;
  unsigned char flags[8] = {};
};
struct Access {
  Location location;
  int flags = 3;  // read and write
};

/// What tests need of the driver beyond what the library does.
struct TestFunctions {
  Status (*cuCtxGetDevice)(int*);
  Status (*cuCtxSynchronize)();
  Status (*cuMemGetInfo)(std::size_t* free, std::size_t* all);
  Status (*cuMemAlloc)(DevicePointer*, std::size_t);
  Status (*cuMemFree)(DevicePointer);
  Status (*cuMemcpyHtoD)(DevicePointer, const void*, std::size_t);
  Status (*cuMemcpyDtoH)(void*, DevicePointer, std::size_t);
  Status (*cuMemsetD8)(DevicePointer, unsigned char, std::size_t);
  Status (*cuMemsetD8Async)(DevicePointer, unsigned char, std::size_t, Stream);
  Status (*cuStreamCreate)(Stream*, unsigned flags);
  Status (*cuStreamDestroy)(Stream);
  Status (*cuStreamBeginCapture)(Stream, int mode);
  Status (*cuStreamEndCapture)(Stream, void** graph);
  Status (*cuGraphInstantiate)(void** executable, void* graph, unsigned long long flags);
  Status (*cuGraphLaunch)(void* executable, Stream);
  Status (*cuGraphExecDestroy)(void*);
  Status (*cuGraphDestroy)(void*);
  Status (*cuMemGetAllocationGranularity)(std::size_t*, const AllocationProperties*, int);
  Status (*cuMemAddressReserve)(DevicePointer*, std::size_t, std::size_t alignment, DevicePointer, unsigned long long);
  Status (*cuMemAddressFree)(DevicePointer, std::size_t);
  Status (*cuMemCreate)(unsigned long long*, std::size_t, const AllocationProperties*, unsigned long long);
  Status (*cuMemRelease)(unsigned long long);
  Status (*cuMemMap)(DevicePointer, std::size_t, std::size_t offset, unsigned long long, unsigned long long);
  Status (*cuMemUnmap)(DevicePointer, std::size_t);
  Status (*cuMemSetAccess)(DevicePointer, std::size_t, const Access*, std::size_t);
};

TestFunctions find_test_functions() {
  std::string reason;
  const cuda::Library library("libcuda.so.1", reason);
  TestFunctions f{};
  if (!library) throw Error(ErrorCode::not_implemented, reason);
  const auto find = [&](const char* name, auto*& function) {
    if (!library.find(name, function)) throw Error(ErrorCode::not_implemented, text("libcuda has no ", name));
  };
  find("cuCtxGetDevice", f.cuCtxGetDevice);
  find("cuCtxSynchronize", f.cuCtxSynchronize);
  find("cuMemGetInfo_v2", f.cuMemGetInfo);
  find("cuMemAlloc_v2", f.cuMemAlloc);
  find("cuMemFree_v2", f.cuMemFree);
  find("cuMemcpyHtoD_v2", f.cuMemcpyHtoD);
  find("cuMemcpyDtoH_v2", f.cuMemcpyDtoH);
  find("cuMemsetD8_v2", f.cuMemsetD8);
  find("cuMemsetD8Async", f.cuMemsetD8Async);
  find("cuStreamCreate", f.cuStreamCreate);
  find("cuStreamDestroy_v2", f.cuStreamDestroy);
  find("cuStreamBeginCapture_v2", f.cuStreamBeginCapture);
  find("cuStreamEndCapture", f.cuStreamEndCapture);
  find("cuGraphInstantiateWithFlags", f.cuGraphInstantiate);
  find("cuGraphLaunch", f.cuGraphLaunch);
  find("cuGraphExecDestroy", f.cuGraphExecDestroy);
  find("cuGraphDestroy", f.cuGraphDestroy);
  find("cuMemGetAllocationGranularity", f.cuMemGetAllocationGranularity);
  find("cuMemAddressReserve", f.cuMemAddressReserve);
  find("cuMemAddressFree", f.cuMemAddressFree);
  find("cuMemCreate", f.cuMemCreate);
  find("cuMemRelease", f.cuMemRelease);
  find("cuMemMap", f.cuMemMap);
  find("cuMemUnmap", f.cuMemUnmap);
  find("cuMemSetAccess", f.cuMemSetAccess);
  return f;
}

const TestFunctions& functions() {
  static const TestFunctions all = find_test_functions();
  return all;
}

DevicePointer address(const std::byte* data) { return reinterpret_cast<DevicePointer>(data); }
Stream stream_of(const TestStream& stream) { return static_cast<Stream>(stream.handle()); }
std::size_t size(std::int64_t bytes) { return static_cast<std::size_t>(bytes); }

bool plain_memory() {
  const char* kind = std::getenv("NARROWS_TEST_MEMORY");
  return kind && std::strcmp(kind, "plain") == 0;
}

constexpr DevicePointer kWatched = 4096;  // bytes before a block that are looked at afterwards

}  // namespace

std::string no_gpu(std::string_view family) {
  const cuda::Driver& driver = cuda::find_driver();
  if (!driver.functions) return driver.absence;
  const cuda::DeviceFacts& facts = cuda::device_facts(0);
  const bool other = family == "sm90" && (facts.major != 9 || facts.minor != 0);
  if (facts.major < 8 || other) return text("cuda:0 has compute capability ", facts.major, ".", facts.minor);
  return "";
}

DeviceBlock::DeviceBlock(std::int64_t bytes, std::int64_t alignment) : bytes_(bytes) {
  if (bytes == 0) return;
  if (plain_memory()) {
    DevicePointer allocated = 0;
    check(functions().cuMemAlloc(&allocated, size(bytes)), "allocating ", bytes, " bytes for a test");
    data_ = reinterpret_cast<std::byte*>(allocated);
  } else {
    map(alignment);
  }
  fill(0xFF);
}

void DeviceBlock::map(std::int64_t alignment) {
  AllocationProperties properties;
  properties.location.id = current_device();
  check(functions().cuMemGetAllocationGranularity(&page_, &properties, 0), "asking for the size of pages");
  mapped_bytes_ = (size(bytes_ + alignment) + page_ - 1) / page_ * page_;
  DevicePointer reserved = 0;
  unsigned long long handle = 0;
  check(functions().cuMemAddressReserve(&reserved, mapped_bytes_ + 2 * page_, 0, 0, 0), "reserving addresses");
  reserved_ = reserved;
  check(functions().cuMemCreate(&handle, mapped_bytes_, &properties, 0), "allocating ", mapped_bytes_, " bytes");
  handle_ = handle;
  const DevicePointer begin = reserved + page_;
  check(functions().cuMemMap(begin, mapped_bytes_, 0, handle, 0), "mapping memory");
  mapped_ = begin;
  const Access access{properties.location};
  check(functions().cuMemSetAccess(begin, mapped_bytes_, &access, 1), "opening memory");
  check(functions().cuMemsetD8(begin, 0xFF, mapped_bytes_), "filling memory");
  const DevicePointer last = begin + mapped_bytes_ - size(bytes_);
  data_ = reinterpret_cast<std::byte*>(last - last % static_cast<DevicePointer>(alignment));
}

DeviceBlock::DeviceBlock(DeviceBlock&& other) noexcept
    : bytes_(std::exchange(other.bytes_, 0)),
      data_(std::exchange(other.data_, nullptr)),
      reserved_(std::exchange(other.reserved_, 0)),
      mapped_(std::exchange(other.mapped_, 0)),
      handle_(std::exchange(other.handle_, 0)),
      page_(other.page_),
      mapped_bytes_(other.mapped_bytes_) {}

DeviceBlock::~DeviceBlock() {
  if (!data_ && !reserved_) return;
  functions().cuCtxSynchronize();
  if (!reserved_) {
    functions().cuMemFree(address(data_));
    return;
  }
  if (mapped_) functions().cuMemUnmap(mapped_, mapped_bytes_);
  if (handle_) functions().cuMemRelease(handle_);
  functions().cuMemAddressFree(reserved_, mapped_bytes_ + 2 * page_);
}

void DeviceBlock::fill(unsigned char value, void* stream) {
  if (!bytes_) return;
  check(functions().cuMemsetD8Async(address(data_), value, size(bytes_), static_cast<Stream>(stream)),
        "filling memory");
}

void DeviceBlock::upload(const void* from, std::int64_t bytes, std::int64_t offset) {
  if (bytes) check(functions().cuMemcpyHtoD(address(data_ + offset), from, size(bytes)), "uploading ", bytes, " bytes");
}

void DeviceBlock::download(void* to, std::int64_t bytes, std::int64_t offset) const {
  if (bytes) check(functions().cuMemcpyDtoH(to, address(data_ + offset), size(bytes)), "downloading ", bytes, " bytes");
}

bool DeviceBlock::margins_intact() const {
  if (!mapped_) return true;
  const DevicePointer begin = address(data_), end = begin + size(bytes_);
  const DevicePointer front = std::min<DevicePointer>(kWatched, begin - mapped_), back = mapped_ + mapped_bytes_ - end;
  std::vector<unsigned char> margins(front + back);
  if (front) check(functions().cuMemcpyDtoH(margins.data(), begin - front, front), "reading a margin");
  if (back) check(functions().cuMemcpyDtoH(margins.data() + front, end, back), "reading a margin");
  return std::all_of(margins.begin(), margins.end(), [](unsigned char byte) { return byte == 0xFF; });
}

TestStream::TestStream() { check(functions().cuStreamCreate(&stream_, 1), "making a stream"); }
TestStream::~TestStream() { functions().cuStreamDestroy(stream_); }

void Graph::begin(const TestStream& stream) {
  check(functions().cuStreamBeginCapture(stream_of(stream), 1), "beginning a capture");  // 1: of this thread
}

void Graph::end(const TestStream& stream) {
  check(functions().cuStreamEndCapture(stream_of(stream), &graph_), "ending a capture");
  check(functions().cuGraphInstantiate(&executable_, graph_, 0), "instantiating a graph");
}

void Graph::drop(const TestStream& stream) {
  functions().cuStreamEndCapture(stream_of(stream), &graph_);
  if (graph_) functions().cuGraphDestroy(graph_);
}

Graph::~Graph() {
  if (executable_) functions().cuGraphExecDestroy(executable_);
  if (graph_) functions().cuGraphDestroy(graph_);
}

void Graph::replay(const TestStream& stream) const {
  check(functions().cuGraphLaunch(executable_, stream_of(stream)), "replaying a graph");
}

void wait_for_device() { check(functions().cuCtxSynchronize(), "waiting for the device"); }

std::int64_t free_device_bytes() {
  std::size_t free = 0, all = 0;
  check(functions().cuMemGetInfo(&free, &all), "asking for free memory");
  return static_cast<std::int64_t>(free);
}

cuda::Context current_context() {
  cuda::Context context = nullptr;
  check(cuda::driver().cuCtxGetCurrent(&context), "asking for the current context");
  return context;
}

int current_device() {
  int device = 0;
  check(functions().cuCtxGetDevice(&device), "asking for the current device");
  return device;
}

}  // namespace narrows::test
