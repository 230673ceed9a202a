// What the stand-in for libcuda.so.1 was asked for, and what it shall answer.
#pragma once

#include <atomic>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace narrows::fake {

inline constexpr int kDevices = 2;
inline constexpr int kFailure = 700;  // CUDA_ERROR_ILLEGAL_ADDRESS
inline constexpr int kOutOfMemory = 2;
inline constexpr int kCaptureImplicit = 906;
inline constexpr std::size_t kArgumentBytes = 8;

/// A tensor as the copy engine was told of it.
struct Map {
  void* address = nullptr;
  std::vector<int> options;  // type, interleave, swizzle, promotion, fill
  std::vector<unsigned long long> sizes, strides;
  std::vector<unsigned> box, steps;
};

struct State {
  std::atomic<int> retained{0}, loaded{0}, allocated{0}, freed{0};
  int capturing = 0;         // cuStreamIsCapturing's answer
  int capturing_status = 0;  // and the status of the call
  int launch_status = 0;
  int allocation_status = 0;
  int map_status = 0;
  Map map;
  std::vector<unsigned> launch;  // blocks, threads, bytes of shared memory
  std::vector<std::pair<int, int>> launch_attributes;
  std::string argument;  // of argument_bytes
  std::size_t argument_bytes = kArgumentBytes;
  std::vector<std::pair<unsigned long long, std::size_t>> filled;  // address and bytes of cuMemsetD8Async
  void* loaded_in = nullptr;                                       // the context that was current
};
}  // namespace narrows::fake

extern "C" narrows::fake::State* fake_state();
extern "C" int fake_has_context();  // how many contexts are pushed in this thread
