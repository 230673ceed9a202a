// A warp on the host, for device text that g++ compiles: each lane is a thread, and what its lanes do together waits for all of
// them. Without a warp a thread is a lane whose neighbours hold what it holds.
//
// Such a test includes this, then the device text inside a namespace of its own, as every test has other constants:
//     namespace here {
//     #include "shared/forward_args.h"
//     namespace narrows { constexpr Element kElement = ...; }
//     #include "kernels/products.cuh"
//     }
// In the compiler's path this folder comes first: its config.cuh is empty, its kernels/ptx_sm80.cuh speaks to the warp.
#pragma once

#include <algorithm>
#include <array>
#include <barrier>
#include <bit>
#include <climits>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#include "cpu/reference_numbers.hpp"

namespace narrows::test {

using Words = std::array<unsigned, 6>;  // that a lane gives to a common operation

class Warp {
 public:
  static constexpr int kLanes = 32;

  explicit Warp(std::size_t shared_bytes) : memory(shared_bytes) {}

  /// Runs body(lane) in 32 threads.
  template <class Body> void run(const Body& body, unsigned first_thread = 0);

  std::array<Words, kLanes> exchange(const Words& own);

  std::vector<unsigned char> memory;  // shared
  int most_conflicts = 1;             // of one access: words that a bank had to give

 private:
  std::array<Words, kLanes> given_{};
  std::barrier<> barrier_{kLanes};
};

struct Lane {
  Warp* warp = nullptr;
  unsigned x = 0;  // of the block; the device's name
};

}  // namespace narrows::test

inline thread_local narrows::test::Lane threadIdx;

namespace narrows::test {

template <class Body> void Warp::run(const Body& body, unsigned first_thread) {
  std::vector<std::jthread> lanes;
  for (unsigned lane = 0; lane < kLanes; ++lane)
    lanes.emplace_back([&, lane] {
      threadIdx = {this, first_thread + lane};
      body(static_cast<int>(lane));
    });
}

inline std::array<Words, Warp::kLanes> Warp::exchange(const Words& own) {
  given_[threadIdx.x % kLanes] = own;
  barrier_.arrive_and_wait();
  const std::array<Words, kLanes> all = given_;
  barrier_.arrive_and_wait();
  return all;
}

}  // namespace narrows::test

// ---- what device text calls without an include
#define __shared__ static

struct float2 {
  float x, y;
};
struct double2 {
  double x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

inline unsigned __shfl_sync(unsigned, unsigned x, int from, int width = 32) {
  if (!threadIdx.warp) return x;
  const unsigned lane = threadIdx.x % 32, w = static_cast<unsigned>(width);
  return threadIdx.warp->exchange({x})[lane / w * w + static_cast<unsigned>(from) % w][0];
}
inline float __shfl_sync(unsigned all, float x, int from) {
  return std::bit_cast<float>(__shfl_sync(all, std::bit_cast<unsigned>(x), from));
}
inline unsigned __ballot_sync(unsigned, bool holds) {
  unsigned lanes = 0, lane = 0;
  for (const auto& words : threadIdx.warp->exchange({holds ? 1u : 0u})) lanes |= words[0] << lane++;
  return lanes;
}
inline float __shfl_xor_sync(unsigned, float x, int mask) {
  if (!threadIdx.warp) return x;
  return std::bit_cast<float>(
      threadIdx.warp->exchange({std::bit_cast<unsigned>(x)})[(threadIdx.x ^ static_cast<unsigned>(mask)) % 32][0]);
}
inline int __any_sync(unsigned, int holds) {
  if (!threadIdx.warp) return holds;
  int any = 0;
  for (const auto& words : threadIdx.warp->exchange({holds ? 1u : 0u})) any |= static_cast<int>(words[0]);
  return any;
}
inline int __reduce_min_sync(unsigned, int x) {
  int least = INT_MAX;
  for (const auto& words : threadIdx.warp->exchange({static_cast<unsigned>(x)}))
    least = std::min(least, static_cast<int>(words[0]));
  return least;
}
inline int __reduce_max_sync(unsigned, int x) {
  int most = INT_MIN;
  for (const auto& words : threadIdx.warp->exchange({static_cast<unsigned>(x)}))
    most = std::max(most, static_cast<int>(words[0]));
  return most;
}
inline void __syncwarp() {
  if (threadIdx.warp) threadIdx.warp->exchange({});
}
inline void __syncthreads() { __syncwarp(); }  // one warp is the block
inline int __syncthreads_or(int holds) { return __any_sync(~0u, holds); }
inline int atomicCAS(int* at, int expected, int wanted) {
  return __atomic_compare_exchange_n(at, &expected, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST), expected;
}
