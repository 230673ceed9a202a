// A warp on the host, for device text that g++ compiles: what its lanes do together waits for all of them (turns.hpp). Without a
// warp a thread is a lane whose neighbours hold what it holds.
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
#include <bit>
#include <climits>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "cpu/reference_numbers.hpp"
#include "turns.hpp"

namespace narrows::test {

using Words = std::array<unsigned, 6>;  // that a lane gives to a common operation

class Warp {
 public:
  static constexpr int kLanes = 32;

  explicit Warp(std::size_t shared_bytes) : memory(shared_bytes) {}

  /// Runs body(lane) for each lane.
  template <class Body> void run(const Body& body, unsigned first_thread = 0);

  /// What all lanes gave, until this lane's next exchange.
  const std::array<Words, kLanes>& exchange(const Words& own);

  /// Of the thread block, or of a warp alone its own.
  std::vector<unsigned char>& shared() { return block_memory ? *block_memory : memory; }

  std::vector<unsigned char> memory;  // shared
  std::vector<unsigned char>* block_memory = nullptr;
  int most_conflicts = 1;  // of one access: words that a bank had to give

 private:
  std::array<Words, kLanes> given_{}, taken_{};
  int arrived_ = 0;
  Turns::Waiting others_;
};

class Block;

struct Lane {
  Warp* warp = nullptr;
  unsigned x = 0;  // of the block; the device's name
  Block* block = nullptr;
  unsigned left = 0;  // meetings of the cluster

  inline void wait(Turns::Waiting& others);
};

}  // namespace narrows::test

inline thread_local narrows::test::Lane threadIdx;
struct GridIndex {
  unsigned x = 0;
};
inline thread_local GridIndex blockIdx, gridDim;

namespace narrows::test {

/// The lanes that run meanwhile leave threadIdx and blockIdx as theirs.
inline void Lane::wait(Turns::Waiting& others) {
  const Lane own = *this;
  const GridIndex own_block = blockIdx;
  others.wait();
  threadIdx = own;
  blockIdx = own_block;
}

template <class Body> void Warp::run(const Body& body, unsigned first_thread) {
  Turns::run(kLanes, [&](unsigned lane) {
    threadIdx = {this, first_thread + lane};
    body(static_cast<int>(lane));
  });
  threadIdx = {};
}

inline const std::array<Words, Warp::kLanes>& Warp::exchange(const Words& own) {
  given_[threadIdx.x % kLanes] = own;
  if (++arrived_ < kLanes) {
    threadIdx.wait(others_);
  } else {
    arrived_ = 0;
    taken_ = given_;
    others_.wake();
  }
  return taken_;
}

}  // namespace narrows::test

// ---- what device text calls without an include
#define __shared__ static

struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};
struct double2 {
  double x, y;
};
struct uint2 {
  unsigned x, y;
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
inline int __shfl_sync(unsigned all, int x, int from) {
  return static_cast<int>(__shfl_sync(all, static_cast<unsigned>(x), from));
}
inline unsigned long long __shfl_sync(unsigned all, unsigned long long x, int from) {
  const unsigned low = __shfl_sync(all, static_cast<unsigned>(x), from);
  return static_cast<unsigned long long>(__shfl_sync(all, static_cast<unsigned>(x >> 32), from)) << 32 | low;
}
inline int __shfl_up_sync(unsigned, int x, int below) {
  const unsigned lane = threadIdx.x % 32,
                 from = lane < static_cast<unsigned>(below) ? lane : lane - static_cast<unsigned>(below);
  return static_cast<int>(threadIdx.warp->exchange({static_cast<unsigned>(x)})[from][0]);
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
inline int __all_sync(unsigned all, int holds) { return !__any_sync(all, !holds); }
inline unsigned __reduce_add_sync(unsigned, unsigned x) {
  unsigned sum = 0;
  for (const auto& words : threadIdx.warp->exchange({x})) sum += words[0];
  return sum;
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
inline unsigned __ballot_sync(unsigned, int holds) {
  unsigned lanes = 0;
  const auto all = threadIdx.warp->exchange({holds ? 1u : 0u});
  for (unsigned lane = 0; lane < all.size(); ++lane) lanes |= all[lane][0] << lane;
  return lanes;
}
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
template <class T> T __ldcg(const T* at) { return *at; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
  unsigned picked = 0;
  for (unsigned i = 0; i < 4; ++i)
    picked |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return picked;
}
inline int __popc(unsigned x) { return std::popcount(x); }
[[noreturn]] inline void __trap() { std::abort(); }
inline void __syncwarp() {
  if (threadIdx.warp) threadIdx.warp->exchange({});
}
inline void __syncthreads();
inline int __syncthreads_or(int holds);
inline unsigned atomicAdd(unsigned* at, unsigned x) { return __atomic_fetch_add(at, x, __ATOMIC_SEQ_CST); }
inline int atomicAdd(int* at, int x) { return __atomic_fetch_add(at, x, __ATOMIC_SEQ_CST); }
inline int atomicMax(int* at, int x) {
  int before = __atomic_load_n(at, __ATOMIC_SEQ_CST);
  while (before < x && !__atomic_compare_exchange_n(at, &before, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
  }
  return before;
}
inline int atomicCAS(int* at, int expected, int wanted) {
  return __atomic_compare_exchange_n(at, &expected, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST), expected;
}

namespace narrows::test {

/// What a kernel ahead does at the end, which a thread block waits for.
inline std::function<void()> previous_kernel;

/// Where all threads of a cluster meet; one that leaves goes on until it waits for the others.
class ClusterMeeting {
 public:
  explicit ClusterMeeting(unsigned threads) : threads_(threads) {}

  void leave() {
    ++threadIdx.left;
    if (++arrived_ < threads_) return;
    arrived_ = 0;
    ++held_;
    others_.wake();
  }
  void wait() {
    while (held_ < threadIdx.left) threadIdx.wait(others_);
  }

 private:
  unsigned threads_, arrived_ = 0, held_ = 0;
  Turns::Waiting others_;
};

/// A thread block of several warps.
class Block {
 public:
  Block(int warps, std::size_t shared_bytes) : memory(shared_bytes) {
    for (int w = 0; w < warps; ++w) {
      warps_.push_back(std::make_unique<Warp>(0));
      warps_.back()->block_memory = &memory;
    }
  }

  /// Runs the kernel in all threads.
  template <class Kernel> void run(const Kernel& kernel, unsigned index, unsigned blocks) {
    Turns::run(threads(), [&](unsigned x) { run_lane(kernel, x, index, blocks); });
    threadIdx = {};
    blockIdx = gridDim = {};
  }
  /// As the lane that runs.
  template <class Kernel> void run_lane(const Kernel& kernel, unsigned x, unsigned index, unsigned blocks) {
    threadIdx = {warps_[x / 32].get(), x, this};
    blockIdx.x = index;
    gridDim.x = blocks;
    kernel();
  }

  bool sync_or(bool holds) {
    any_ |= holds;
    if (++arrived_ < threads()) {
      threadIdx.wait(others_);
    } else {
      arrived_ = 0;
      found_ = std::exchange(any_, false);
      others_.wake();
    }
    return found_;
  }

  // ---- mbarriers, by shared address
  void init_barrier(unsigned at, unsigned count) { barriers_[at] = {.count = count, .pending = count, .others = {}}; }
  /// So many arrivals, and so many bytes that are still to come; negative: that came.
  void arrive(unsigned at, unsigned arrivals, long bytes) {
    Barrier& barrier = barriers_.at(at);
    barrier.pending -= arrivals;
    barrier.bytes += bytes;
    if (barrier.pending != 0 || barrier.bytes != 0) return;
    ++barrier.phase;
    barrier.pending = barrier.count;
    barrier.others.wake();
  }
  void wait_barrier(unsigned at, unsigned parity) {
    Barrier& barrier = barriers_.at(at);
    while (barrier.phase % 2 == parity) threadIdx.wait(barrier.others);
  }

  // ---- named barriers: the last of so many warps lets those go that wait
  void named(int number, int warps, bool waits) {
    Named& barrier = named_[static_cast<std::size_t>(number)];
    if (++barrier.arrived == warps) {
      barrier.arrived = 0;
      barrier.others.wake();
    } else if (waits) {
      threadIdx.wait(barrier.others);
    }
  }

  /// By a name that no test gives another meaning.
  std::vector<unsigned char>& shared() { return memory; }

  std::vector<unsigned char> memory;  // shared
  std::vector<Block*> cluster{this};
  ClusterMeeting* meeting = nullptr;  // none of a block alone

 private:
  struct Barrier {
    unsigned count = 0, pending = 0, phase = 0;
    long bytes = 0;
    Turns::Waiting others;
  };
  struct Named {
    int arrived = 0;
    Turns::Waiting others;
  };

  unsigned threads() const { return 32 * static_cast<unsigned>(warps_.size()); }

  std::vector<std::unique_ptr<Warp>> warps_;
  unsigned arrived_ = 0;
  bool any_ = false, found_ = false;
  Turns::Waiting others_;
  std::map<unsigned, Barrier> barriers_;
  std::array<Named, 16> named_;
};

/// Thread blocks that run together and reach each other's shared memory.
class Cluster {
 public:
  Cluster(int blocks, int warps, std::size_t shared_bytes)
      : threads_(32 * static_cast<unsigned>(warps)), meeting_(threads_ * static_cast<unsigned>(blocks)) {
    for (int rank = 0; rank < blocks; ++rank) blocks_.push_back(std::make_unique<Block>(warps, shared_bytes));
    for (const auto& block : blocks_) {
      block->meeting = &meeting_;
      block->cluster.clear();
      for (const auto& other : blocks_) block->cluster.push_back(other.get());
    }
  }

  /// Thread blocks [first, first + size of the cluster) of the grid, whose shared memory is this byte everywhere.
  template <class Kernel> void run(const Kernel& kernel, unsigned first, unsigned blocks, unsigned char poison) {
    for (const auto& block : blocks_) std::fill(block->memory.begin(), block->memory.end(), poison);
    const unsigned size = static_cast<unsigned>(blocks_.size());
    Turns::run(size * threads_, [&](unsigned lane) {
      const unsigned rank = lane / threads_;
      blocks_[rank]->run_lane(kernel, lane % threads_, first + rank, blocks);
    });
    threadIdx = {};
    blockIdx = gridDim = {};
  }

 private:
  unsigned threads_;
  ClusterMeeting meeting_;
  std::vector<std::unique_ptr<Block>> blocks_;
};

}  // namespace narrows::test

inline int __syncthreads_or(int holds) {
  return threadIdx.block ? threadIdx.block->sync_or(holds != 0) : __any_sync(~0u, holds);
}
inline void __syncthreads() { __syncthreads_or(0); }  // a warp alone is the block
