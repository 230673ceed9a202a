// The instructions of src/kernels/ptx_sm90.cuh, for tests/kernels/device/device.hpp: everything asynchronous is done at
// once. The matrix products read shared memory as their descriptors say.
#pragma once
#include "kernels/ptx_sm80.cuh"
#include "shared/forward_sm90_args.h"

namespace narrows {

constexpr int kWarpgroup = 128;

inline void init_barrier(u32 barrier, u32 count) { threadIdx.block->init_barrier(barrier, count); }
inline void fence_barrier_init() {}
inline void arrive(u32 barrier) { threadIdx.block->arrive(barrier, 1, 0); }
inline void arrive_expecting(u32 barrier, u32 bytes) { threadIdx.block->arrive(barrier, 1, static_cast<long>(bytes)); }
inline void arrive_after_copies(u32 barrier) { arrive(barrier); }
inline void wait_barrier(u32 barrier, u32 parity) { threadIdx.block->wait_barrier(barrier, parity); }

// The byte of a tile that its swizzle stores at another place: an exclusive or of address bits.
inline u32 swizzled(u32 address) { return address ^ (address >> 3 & 0x70u); }

// ---- the copy engine: what stands in a TensorMap here
struct Described {
  char* data;
  i64 sizes[4];    // columns, rows, heads, sequences
  i64 strides[4];  // bytes
  i64 box_rows;
};
inline TensorMap describe(const Described& tensor) {
  static_assert(sizeof(Described) <= sizeof(TensorMap));
  TensorMap map{};
  std::memcpy(map.bytes, &tensor, sizeof tensor);
  return map;
}

constexpr u64 kEvictFirst = 1, kEvictLast = 2;
struct BoxPlace {
  i32 column, row, head, sequence;
};
inline void prefetch_map(const TensorMap&) {}

// visit(byte in shared memory, the element or null where there is none) for each of 64 columns of each row of a box.
template <class Visit> void visit_box(const TensorMap& map, u32 to, const BoxPlace& at, const Visit& visit) {
  Described t;
  std::memcpy(&t, map.bytes, sizeof t);
  for (i64 row = 0; row < t.box_rows; ++row)
    for (i64 column = 0; column < 64; ++column) {
      const i64 place[4] = {at.column + column, at.row + row, at.head, at.sequence};
      bool inside = true;
      i64 offset = 0;
      for (int axis = 0; axis < 4; ++axis) {
        inside = inside && 0 <= place[axis] && place[axis] < t.sizes[axis];
        offset += place[axis] * t.strides[axis];
      }
      visit(swizzled(to + static_cast<u32>(row * 128 + column * 2)), inside ? t.data + offset : nullptr);
    }
}
inline void load_box_to(::narrows::test::Block& block, u32 to, const TensorMap& map, u32 barrier, const BoxPlace& at) {
  long bytes = 0;
  visit_box(map, to, at, [&](u32 byte, const char* element) {
    unsigned short x = 0;
    if (element) std::memcpy(&x, element, sizeof x);
    std::memcpy(&block.shared().at(byte), &x, sizeof x);
    bytes += 2;
  });
  block.arrive(barrier, 0, -bytes);
}
inline void load_box(u32 to, const TensorMap& map, u32 barrier, const BoxPlace& at, u64) {
  load_box_to(*threadIdx.block, to, map, barrier, at);
}
inline void load_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  for (u32 at = 0; at < bytes; at += 4) {
    u32 word;
    std::memcpy(&word, static_cast<const char*>(from) + at, sizeof word);
    put_shared(to + at, word);
  }
  threadIdx.block->arrive(barrier, 0, -static_cast<long>(bytes));
}
inline void store_box(const TensorMap& map, u32 from, const BoxPlace& at) {
  visit_box(map, from, at, [](u32 byte, char* element) {
    const auto x = shared_at<unsigned short>(byte);
    if (element) std::memcpy(element, &x, sizeof x);
  });
}
inline void prefetch_row(const char*, u32) {}
inline void commit_stores() {}
inline void wait_stores_read() {}
inline void wait_stores() {}
inline void fence_async_shared() {}

inline char* shared_tiles() { return dynamic_shared(); }

// ---- thread blocks of a cluster: the number of one stands above its addresses
constexpr u32 kAddressBits = 24;
inline u32 address_of(u32 own, u32 rank) { return own | (rank + 1) << kAddressBits; }
inline ::narrows::test::Block& block_at(u32 address) {
  return *threadIdx.block->cluster.at((address >> kAddressBits) - 1);
}
inline u32 offset_of(u32 address) { return address & ((1u << kAddressBits) - 1); }
inline void leave_cluster() { threadIdx.block->meeting->leave(); }
inline void await_cluster() { threadIdx.block->meeting->wait(); }
inline void meet_cluster() {
  leave_cluster();
  await_cluster();
}
inline void arrive_there(u32 barrier) { block_at(barrier).arrive(offset_of(barrier), 1, 0); }
inline void store_there(u32 at, u32 x) { std::memcpy(&block_at(at).shared().at(offset_of(at)), &x, sizeof x); }
inline void send_bytes(u32 to, u32 from, u32 bytes, u32 barrier) {
  std::vector<unsigned char>& there = block_at(to).shared();
  there.at(offset_of(to) + bytes - 1) = 0;
  std::memcpy(&there[offset_of(to)], &threadIdx.block->shared().at(from), bytes);
  block_at(barrier).arrive(offset_of(barrier), 0, -static_cast<long>(bytes));
}
template <int blocks> void load_box_everywhere(u32 to, const TensorMap& map, u32 barrier, const BoxPlace& at, u64) {
  for (int rank = 0; rank < blocks; ++rank)
    load_box_to(*threadIdx.block->cluster.at(static_cast<std::size_t>(rank)), to, map, barrier, at);
}

inline u32 clock() {
  thread_local u32 now = 0;
  return now += 1024;
}
inline u32 pick_bytes(u32 a, u32 b, u32 selector) {
  u32 bytes = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u32 digit = selector >> 4 * i & 7u;
    bytes |= ((digit < 4 ? a : b) >> 8 * (digit % 4) & 0xffu) << 8 * i;
  }
  return bytes;
}

// ---- numbers of the whole call
inline void add_global4(float* at, const float (&x)[4]) {
  for (int i = 0; i < 4; ++i) at[i] += x[i];
}
inline void add_global(float* at, float x) { *at += x; }
inline void store_release(u32* at, u32 x) { __atomic_store_n(at, x, __ATOMIC_RELEASE); }

// ---- warpgroup
template <int> void shrink_registers() {}
template <int> void grow_registers() {}
// By a warp as one, as the instructions are.
inline void meet(int barrier, int threads) {
  __syncwarp();
  if (threadIdx.x % kWarp == 0) threadIdx.block->named(barrier, threads / kWarp, true);
  __syncwarp();
}
inline void pass(int barrier, int threads) {
  __syncwarp();
  if (threadIdx.x % kWarp == 0) threadIdx.block->named(barrier, threads / kWarp, false);
}
inline void fence_products() {}
inline void commit_products() {}
template <int> void wait_products() { __syncwarp(); }  // all lanes have read what may be overwritten then
inline u32 anew(u32 x) { return x; }
inline void hold_schedule(u32) {}
template <int n> void pin(float (&)[1][n][4]) {}

inline void store_matrices(u32 row, u32 a, u32 b, u32 c, u32 d) {
  const auto rows = threadIdx.warp->exchange({row});
  const u32 lane = threadIdx.x % kWarp, words[4] = {a, b, c, d};
  for (u32 m = 0; m < 4; ++m) put_shared(rows[8 * m + lane / 4][0] + lane % 4 * 4, words[m]);
}

// ---- matrix products of a warpgroup, one thread's part
inline float element_of(unsigned short bits, bool fp16) { return fp16 ? widen_fp16(bits) : as_float(u32{bits} << 16); }

struct Described64 {
  u32 address, leading, stride;

  explicit Described64(u64 descriptor)
      : address(static_cast<u32>(descriptor & 0x3fff) * 16),
        leading(static_cast<u32>(descriptor >> 16 & 0x3fff) * 16),
        stride(static_cast<u32>(descriptor >> 32 & 0x3fff) * 16) {}
  // Element `inner` of row `outer`, rows of 128 bytes.
  unsigned short at(u32 outer, u32 inner) const {
    return shared_at<unsigned short>(
        swizzled(address + inner / 64 * leading + outer / 8 * stride + outer % 8 * 128 + inner % 64 * 2));
  }
};

// Row r (of two) of this thread's A, from shared memory or from the quad's registers.
using RowsOfA = float[2][16];

inline void rows_of_a(RowsOfA& rows, u64 a, bool fp16) {
  const Described64 tile(a);
  const u32 first = threadIdx.x % kWarpgroup / kWarp * 16 + threadIdx.x % kWarp / 4;
  for (u32 r = 0; r < 2; ++r)
    for (u32 k = 0; k < 16; ++k) rows[r][k] = element_of(tile.at(first + 8 * r, k), fp16);
}
inline void rows_of_a(RowsOfA& rows, const u32 (&a)[4], bool fp16) {
  const auto all = threadIdx.warp->exchange({a[0], a[1], a[2], a[3]});
  const u32 quad = threadIdx.x % kWarp / 4 * 4;
  for (u32 r = 0; r < 2; ++r)
    for (u32 k = 0; k < 16; ++k) {
      const u32 word = all[quad + k % 8 / 2][k / 8 * 2 + r];
      rows[r][k] = element_of(static_cast<unsigned short>(k % 2 ? word >> 16 : word), fp16);
    }
}

inline void columns_of_a(RowsOfA& rows, u64 a, bool fp16) {
  const Described64 tile(a);
  const u32 first = threadIdx.x % kWarpgroup / kWarp * 16 + threadIdx.x % kWarp / 4;
  for (u32 r = 0; r < 2; ++r)
    for (u32 k = 0; k < 16; ++k) rows[r][k] = element_of(tile.at(k, first + 8 * r), fp16);
}

template <int n>
void multiply_rows_on_host(float (&d)[1][n][4], const RowsOfA& rows, u64 b, bool down_columns, int adds, bool fp16) {
  const Described64 tile(b);
  for (u32 i = 0; i < 4 * n; ++i) {
    const u32 column = i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    float sum = adds ? d[0][i / 4][i % 4] : 0.f;
    for (u32 k = 0; k < 16; ++k)
      sum += rows[i / 2 % 2][k] * element_of(down_columns ? tile.at(k, column) : tile.at(column, k), fp16);
    d[0][i / 4][i % 4] = sum;
  }
}

template <int n, class A>
void multiply_on_host(float (&d)[1][n][4], const A& a, u64 b, bool down_columns, int adds, bool fp16) {
  RowsOfA rows;
  rows_of_a(rows, a, fp16);
  multiply_rows_on_host(d, rows, b, down_columns, adds, fp16);
}
// Of A the sum runs down the tile's columns as well.
template <int n> void multiply_columns_on_host(float (&d)[1][n][4], u64 a, u64 b, int adds, bool fp16) {
  RowsOfA rows;
  columns_of_a(rows, a, fp16);
  multiply_rows_on_host(d, rows, b, true, adds, fp16);
}

}  // namespace narrows
