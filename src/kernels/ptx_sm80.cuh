// The instructions of sm_80 that the kernels use, one named function each. Shared addresses are 32-bit (state space .shared).
#pragma once
#include "shared/params.h"

namespace narrows {

constexpr int kWarp = 32;  // threads

inline u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }
// What the launch asks for.
inline char* dynamic_shared() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}

// ---- asynchronous copies, global to shared
// 4, 8 or 16 bytes; zeros where `valid` is false, and then nothing is read.
template <int bytes> inline void copy_async(u32 to, const void* from, bool valid) {
  static_assert(bytes == 4 || bytes == 8 || bytes == 16);
  if constexpr (bytes == 16)
    asm volatile(
        "{\n .reg .pred absent;\n setp.eq.u32 absent, %2, 0;\n"
        " cp.async.cg.shared.global [%0], [%1], 16, absent;\n}" ::"r"(to),
        "l"(from), "r"(static_cast<u32>(valid))
        : "memory");
  else
    asm volatile(
        "{\n .reg .pred absent;\n setp.eq.u32 absent, %2, 0;\n"
        " cp.async.ca.shared.global [%0], [%1], %3, absent;\n}" ::"r"(to),
        "l"(from), "r"(static_cast<u32>(valid)), "n"(bytes)
        : "memory");
}
inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most n groups are in flight.
template <int n> inline void wait_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(n) : "memory"); }

// ---- shared memory
// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
inline void load_matrices(u32 row, u32 (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
inline void load_matrices_transposed(u32 row, u32 (&r)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
inline u32 load_shared(u32 at) {
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}
inline void store_shared(u32 at, u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }
inline void store_shared16(u32 at, unsigned short x) {
  asm volatile("st.shared.b16 [%0], %1;" ::"r"(at), "h"(x) : "memory");
}
inline void store_shared8(u32 at, u32 x) { asm volatile("st.shared.u8 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }
inline void load_shared64(u32 at, u32 (&x)[2]) {
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(at) : "memory");
}
inline void store_shared64(u32 at, u32 a, u32 b) {
  asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(at), "r"(a), "r"(b) : "memory");
}
inline void store_shared128(u32 at, const u32 (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(at), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
inline void load_shared128(u32 at, u32& a, u32& b, u32& c, u32& d) {
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(at) : "memory");
}
inline unsigned short load_shared16(u32 at) {
  unsigned short x;
  asm volatile("ld.shared.b16 %0, [%1];" : "=h"(x) : "r"(at) : "memory");
  return x;
}

// ---- global memory
// 16 bytes that are read once, where `valid` is true. By a predicate and into registers that keep their values, since loads behind
// a branch are copied out of other registers, which waits for them.
inline void load_stream_if(bool valid, const char* at, u32 (&x)[4]) {
  asm volatile(
      "{\n .reg .pred valid;\n setp.ne.u32 valid, %5, 0;\n"
      " @valid ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
      : "+r"(x[0]), "+r"(x[1]), "+r"(x[2]), "+r"(x[3])
      : "l"(at), "r"(static_cast<u32>(valid)));
}
// Brings the 128 bytes around an address to L2. A hint: no result depends on what they hold.
inline void fetch_line(const char* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }
// Four neighbours, aligned, at once: of a float4 that is kept in registers the compiler stores word by word.
inline void store_global4(float* at, const float4& x) {
  asm volatile("st.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(at), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w) : "memory");
}
inline void store_global2(char* at, u32 a, u32 b) {
  asm volatile("st.global.v2.b32 [%0], {%1,%2};" ::"l"(at), "r"(a), "r"(b) : "memory");
}
// A word that thread blocks share. What changes it releases what was written before and acquires what others released.
struct SharedWord {
  u64* at;

  u64 add(u64 x) const {
    u64 before;
    asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;" : "=l"(before) : "l"(at), "l"(x) : "memory");
    return before;
  }
  u64 swap_if(u64 expected, u64 x) const {
    u64 before;
    asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(before)
                 : "l"(at), "l"(expected), "l"(x)
                 : "memory");
    return before;
  }
  u64 read() const {
    u64 x;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
    return x;
  }
  u64 read_acquired() const {
    u64 x;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(x) : "l"(at) : "memory");
    return x;
  }
  void write(u64 x) const { asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(x) : "memory"); }
};

// ---- sums in global memory, by the memory itself
inline void add_global(float* at, float x) {
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(at), "f"(x) : "memory");
}
// Four neighbours, aligned; from sm_90 on.
inline void add_global4(float* at, const float (&x)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(at), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}
// Of a number that others store. What was written before store_release is there once the number is seen.
inline u32 load_relaxed(const u32* at) {
  u32 x;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}
inline void store_release(u32* at, u32 x) {
  asm volatile("st.release.gpu.global.b32 [%0], %1;" ::"l"(at), "r"(x) : "memory");
}

// ---- kernels that overlap, on Hopper and later (Program::begins_early): elsewhere, and where the launch does not ask for it,
// these do nothing
constexpr bool kOverlaps = __CUDA_ARCH__ >= 900;
// Until the kernel before this one on the stream has ended and all that it wrote can be read. All threads call it, before they read
// or write what another kernel may use: scratch, tickets and results of the call before among it.
inline void wait_for_previous() {
  if constexpr (kOverlaps) asm volatile("griddepcontrol.wait;" ::: "memory");
}
// The kernel after this one may begin once all thread blocks have come here or ended; it waits in its turn for their end.
inline void let_next_begin() {
  if constexpr (kOverlaps) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- matrix products: d (16x8, fp32) += a (16xk) b (kx8)
inline void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
inline void mma_fp16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
inline void mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- registers
// Of the block. Read anew at every use: kept through a loop it would cost registers, and so would all that follows from it.
inline u32 thread_index() {
  u32 x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}
inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
inline float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
inline float tanh_approx(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// The lesser; NaN if one is.
inline float min_or_nan(float a, float b) {
  float c;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
}
inline float as_float(u32 bits) { return __builtin_bit_cast(float, bits); }
inline u32 as_bits(float x) { return __builtin_bit_cast(u32, x); }
inline float lane_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
// Of the four lanes that share a row. A NaN is no maximum.
inline float quad_max(float x) {
  x = fmaxf(x, lane_xor(x, 1));
  return fmaxf(x, lane_xor(x, 2));
}
inline float quad_sum(float x) {
  x += lane_xor(x, 1);
  return x + lane_xor(x, 2);
}
// Of all lanes, the same in each.
inline float warp_max(float x) {
#pragma unroll
  for (int mask = kWarp / 2; mask != 0; mask /= 2) x = fmaxf(x, lane_xor(x, mask));
  return x;
}
inline float warp_sum(float x) {
#pragma unroll
  for (int mask = kWarp / 2; mask != 0; mask /= 2) x += lane_xor(x, mask);
  return x;
}
inline u32 pack_bf16(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
inline u32 pack_fp16(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
inline float widen_fp16(unsigned short x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

}  // namespace narrows
