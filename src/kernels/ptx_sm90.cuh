// The instructions of sm_90a that the kernels use, one named function each. Shared addresses are 32-bit (state space
// .shared).
#pragma once
#include "kernels/ptx_sm80.cuh"
#include "shared/forward_sm90_args.h"

namespace narrows {

constexpr int kWarpgroup = 128;  // threads

// What the launch asks for, from where tiles that wgmma reads may begin. It lies behind the kernel's own shared memory, which
// may be a header's: then only the alignment moves it there.
inline char* shared_tiles() {
  extern __shared__ __align__(1024) char memory[];
  return memory;
}

// ---- mbarrier
inline void init_barrier(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}
inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
inline void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }
// One arrival, and this many bytes still to come.
inline void arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Until the phase of that parity has completed.
inline void wait_barrier(u32 barrier, u32 parity) {
  asm volatile(
      "{\n .reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      " @p bra done;\n bra again;\n"
      "done:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// One arrival, once all that the thread has copied asynchronously is there.
inline void arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// ---- the copy engine (TMA)
constexpr u64 kEvictFirst = 0x12F0000000000000ull, kEvictLast = 0x14F0000000000000ull;  // L2 cache hints
inline void prefetch_map(const TensorMap& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }
// Where a box of a tensor begins.
struct BoxPlace {
  i32 column, row, head, sequence;
};
inline void load_box(u32 to, const TensorMap& map, u32 barrier, const BoxPlace& at, u64 hint) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.sequence), "l"(hint)
      : "memory");
}
// Bytes as they lie, multiples of 16.
inline void load_bytes(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// What lies outside the tensor is not written.
inline void store_box(const TensorMap& map, u32 from, const BoxPlace& at) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(from), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.sequence)
               : "memory");
}
inline void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the engine has read what it stores; until it has stored it.
inline void wait_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
inline void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Shared memory that threads wrote, for the engine and the tensor cores.
inline void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- thread blocks of a cluster, by their number in it
// Where thread block `rank` has what lies at `own` here; sums of it and offsets are such addresses too.
inline u32 address_of(u32 own, u32 rank) {
  u32 address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(own), "r"(rank));
  return address;
}
// All of its threads, as __syncthreads, in two halves. What a thread did before it left is seen behind the other; where that was
// to global memory leaving waits for it.
inline void leave_cluster() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
inline void await_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
inline void meet_cluster() {
  leave_cluster();
  await_cluster();
}
inline void arrive_there(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
inline void store_there(u32 at, u32 x) {
  asm volatile("st.shared::cluster.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}
// Bytes of this thread block to another one, whose barrier is told of them.
inline void send_bytes(u32 to, u32 from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "r"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// A box to the same place in each of the first `blocks` thread blocks; the barrier at the same place there is told.
template <int blocks>
inline void load_box_everywhere(u32 to, const TensorMap& map, u32 barrier, const BoxPlace& at, u64 hint) {
  constexpr unsigned short all = (1 << blocks) - 1;
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.sequence), "h"(all), "l"(hint)
      : "memory");
}

// ---- time
inline u32 clock() {
  u32 now;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(now));
  return now;
}

// ---- warpgroup
template <int n> inline void shrink_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n)); }
template <int n> inline void grow_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n)); }
inline void meet(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
inline void pass(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
inline void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most n groups are in flight.
template <int n> inline void wait_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(n) : "memory"); }
// No instruction: keeps the compiler from moving reads or writes of accumulators across a fence or a wait.
template <int n> inline void pin(float (&x)[1][n][4]) {
#pragma unroll
  for (int j = 0; j < n; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(x[0][j][i])::"memory");
}

// The same number, of which the compiler knows nothing: what is made of it is made again and not kept in registers.
inline u32 anew(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

// ptxas moves a wait for products up over arithmetic, but not out of its basic block: a branch that is never taken
// holds it here. not_zero: what ptxas does not know.
inline void hold_schedule(u32 not_zero) {
  asm volatile(
      "{\n .reg .pred p;\n setp.ne.u32 p, %0, 0;\n"
      " @p bra go;\n nanosleep.u32 64;\n"
      "go:\n}" ::"r"(not_zero)
      : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
inline void store_matrices(u32 row, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// Four of the bytes of a (0 to 3) and b (4 to 7), the lowest first: a digit of the selector each.
inline u32 pick_bytes(u32 a, u32 b, u32 selector) {
  u32 bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(a), "r"(b), "r"(selector));
  return bytes;
}

}  // namespace narrows
