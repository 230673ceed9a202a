// The instructions of src/kernels/ptx_sm80.cuh as PTX's manual describes them, for tests/kernels/device/device.hpp. Shared
// addresses are offsets in the warp's memory.
#pragma once
#include "shared/params.h"

namespace narrows {

constexpr int kWarp = 32;  // threads

// ---- shared memory
template <class T> T shared_at(u32 at) {
  T x;
  std::memcpy(&x, &threadIdx.warp->shared().at(at), sizeof x);
  return x;
}

// Of what is not there, 0: memory of a test's own begins where shared memory does.
inline u32 shared_address(const void* p) {
  const std::vector<unsigned char>& all = threadIdx.warp->shared();
  const auto at = static_cast<const unsigned char*>(p) - all.data();
  return at >= 0 && at < static_cast<std::ptrdiff_t>(all.size()) ? static_cast<u32>(at) : 0;
}
inline char* dynamic_shared() { return reinterpret_cast<char*>(threadIdx.warp->shared().data()); }

template <class T> void put_shared(u32 at, T x) {
  threadIdx.warp->shared().at(at + sizeof x - 1) = 0;
  std::memcpy(&threadIdx.warp->shared()[at], &x, sizeof x);
}

// How many words the busiest bank gives to those who ask at once.
inline void count_conflicts(const u32* words, int count) {
  int most = 0;
  for (int i = 0; i < count; ++i) {
    int others = 0;
    for (int j = 0; j < count; ++j) others += words[i] != words[j] && words[i] % 32 == words[j] % 32;
    most = std::max(most, others + 1);
  }
  if (threadIdx.x % kWarp == 0) threadIdx.warp->most_conflicts = std::max(threadIdx.warp->most_conflicts, most);
}

// Row `row` of matrix m begins at address of lane 8m + row.
inline auto matrix_rows(u32 row) {
  const auto rows = threadIdx.warp->exchange({row});
  for (u32 m = 0; m < 4; ++m) {
    u32 words[32];
    for (u32 i = 0; i < 32; ++i) words[i] = rows[8 * m + i / 4][0] / 4 + i % 4;
    count_conflicts(words, 32);
  }
  return rows;
}
inline void load_matrices(u32 row, u32 (&r)[4]) {
  const auto rows = matrix_rows(row);
  const u32 lane = threadIdx.x % kWarp;
  for (u32 m = 0; m < 4; ++m) r[m] = shared_at<u32>(rows[8 * m + lane / 4][0] + lane % 4 * 4);
}
inline void load_matrices_transposed(u32 row, u32 (&r)[4]) {
  const auto rows = matrix_rows(row);
  const u32 lane = threadIdx.x % kWarp;
  for (u32 m = 0; m < 4; ++m) {
    const auto element = [&](u32 i) -> u32 { return shared_at<unsigned short>(rows[8 * m + i][0] + lane / 4 * 2); };
    r[m] = element(lane % 4 * 2) | element(lane % 4 * 2 + 1) << 16;
  }
}
inline u32 load_shared(u32 at) {
  const auto all = threadIdx.warp->exchange({at});
  u32 words[32];
  for (u32 i = 0; i < 32; ++i) words[i] = all[i][0] / 4;
  count_conflicts(words, 32);
  return shared_at<u32>(at);
}

inline void load_shared64(u32 at, u32 (&x)[2]) {
  x[0] = shared_at<u32>(at);
  x[1] = shared_at<u32>(at + 4);
}
inline unsigned short load_shared16(u32 at) { return shared_at<unsigned short>(at); }
inline void store_shared(u32 at, u32 x) { put_shared(at, x); }
inline void store_shared64(u32 at, u32 a, u32 b) {
  put_shared(at, a);
  put_shared(at + 4, b);
}
inline void load_shared128(u32 at, u32& a, u32& b, u32& c, u32& d) {
  a = shared_at<u32>(at);
  b = shared_at<u32>(at + 4);
  c = shared_at<u32>(at + 8);
  d = shared_at<u32>(at + 12);
}
inline void store_shared128(u32 at, const u32 (&x)[4]) {
  for (u32 word = 0; word < 4; ++word) put_shared(at + 4 * word, x[word]);
}
inline void store_shared16(u32 at, unsigned short x) { put_shared(at, x); }
inline void store_shared8(u32 at, u32 x) { put_shared(at, static_cast<unsigned char>(x)); }
template <int bytes> void copy_async(u32 to, const void* from, bool valid) {
  std::array<unsigned char, bytes> piece{};
  if (valid) std::memcpy(piece.data(), from, bytes);
  put_shared(to, piece);
}
inline void commit_copies() {}
template <int n> void wait_copies() {}  // they came at once

// ---- global memory
inline void load_stream_if(bool valid, const char* at, u32 (&x)[4]) {
  if (valid) std::memcpy(x, at, sizeof x);
}
inline void fetch_line(const char*) {}
inline u32 load_relaxed(const u32* at) { return __atomic_load_n(at, __ATOMIC_RELAXED); }
inline void store_global4(float* at, const float4& x) { std::memcpy(at, &x, sizeof x); }
inline void store_global2(char* at, u32 a, u32 b) {
  std::memcpy(at, &a, sizeof a);
  std::memcpy(at + sizeof a, &b, sizeof b);
}
struct SharedWord {
  u64* at;

  u64 add(u64 x) const { return __atomic_fetch_add(at, x, __ATOMIC_SEQ_CST); }
  u64 swap_if(u64 expected, u64 x) const {
    __atomic_compare_exchange_n(at, &expected, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
  }
  u64 read() const { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }
  u64 read_acquired() const { return __atomic_load_n(at, __ATOMIC_SEQ_CST); }
  void write(u64 x) const { __atomic_store_n(at, x, __ATOMIC_SEQ_CST); }
};

// ---- kernels that overlap: here each has ended before the next, but for what a test does in its place
constexpr bool kOverlaps = true;
inline void wait_for_previous() {
  if (!::narrows::test::previous_kernel) return;
  __syncthreads();
  if (threadIdx.x == 0) ::narrows::test::previous_kernel();
  __syncthreads();
}
inline void let_next_begin() {}

// ---- registers
inline u32 thread_index() { return threadIdx.x; }
inline float min_or_nan(float a, float b) { return a != a || b != b ? a + b : a < b ? a : b; }
inline float as_float(u32 bits) { return __builtin_bit_cast(float, bits); }
inline u32 as_bits(float x) { return __builtin_bit_cast(u32, x); }
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? 0.f * x : x; }
inline float exp2_approx(float x) { return flushed(std::exp2(flushed(x))); }
inline float log2_approx(float x) { return std::log2(flushed(x)); }
inline float tanh_approx(float x) { return std::tanh(x); }
inline float lane_xor(float x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
inline float quad_max(float x) {
  x = std::fmax(x, lane_xor(x, 1));
  return std::fmax(x, lane_xor(x, 2));
}
inline float quad_sum(float x) {
  x += lane_xor(x, 1);
  return x + lane_xor(x, 2);
}
inline float warp_max(float x) {
  for (int mask = kWarp / 2; mask != 0; mask /= 2) x = std::fmax(x, lane_xor(x, mask));
  return x;
}
inline float warp_sum(float x) {
  for (int mask = kWarp / 2; mask != 0; mask /= 2) x += lane_xor(x, mask);
  return x;
}
// Rounded to nearest, ties to even; every NaN becomes one.
inline u32 bf16_bits(float x) { return x != x ? 0x7fffu : (as_bits(x) + 0x7fffu + (as_bits(x) >> 16 & 1u)) >> 16; }
inline u32 pack_bf16(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }
inline u32 fp16_bits(float x) {
  unsigned short bits = 0;
  ::narrows::reference::store(&bits, ::narrows::DType::fp16, 0, static_cast<double>(x));
  return bits;
}
inline u32 pack_fp16(float low, float high) { return fp16_bits(low) | fp16_bits(high) << 16; }
inline float widen_fp16(unsigned short x) {
  return static_cast<float>(::narrows::reference::load(&x, ::narrows::DType::fp16, 0));
}

// ---- matrix products: d (16x8, fp32) += a (16xk) b (kx8)
// A lane's share: rows and columns of d are i / 2 * 8 + lane / 4 and lane % 4 * 2 + i % 2. Registers of a go down 8 rows, then
// right by half of k, those of b down by half of k. a(row, k), b(k, column) of all lanes' registers.
template <class A, class B> void multiply_add(float (&d)[4], int depth, const A& a, const B& b) {
  const u32 lane = threadIdx.x % kWarp;
  for (u32 i = 0; i < 4; ++i)
    for (u32 k = 0; k < static_cast<u32>(depth); ++k) d[i] += a(lane / 4 + i / 2 * 8, k) * b(k, lane % 4 * 2 + i % 2);
}
template <class Widen> void mma_pairs(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1, const Widen& widen) {
  const auto all = threadIdx.warp->exchange({a[0], a[1], a[2], a[3], b0, b1});
  const auto half = [&](u32 word, u32 k) { return widen(static_cast<unsigned short>(word >> 16 * (k % 2))); };
  multiply_add(
      d, 16, [&](u32 row, u32 k) { return half(all[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k); },
      [&](u32 k, u32 column) { return half(all[column * 4 + k % 8 / 2][4 + k / 8], k); });
}
inline void mma_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  mma_pairs(d, a, b0, b1, [](unsigned short x) { return as_float(u32{x} << 16); });
}
inline void mma_fp16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_pairs(d, a, b0, b1, widen_fp16); }
inline void mma_tf32(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  const auto all = threadIdx.warp->exchange({a[0], a[1], a[2], a[3], b0, b1});
  const auto upper = [](u32 word) { return as_float(word & 0xffffe000u); };
  multiply_add(
      d, 8, [&](u32 row, u32 k) { return upper(all[row % 8 * 4 + k % 4][row / 8 + k / 4 * 2]); },
      [&](u32 k, u32 column) { return upper(all[column * 4 + k % 4][4 + k / 4]); });
}

}  // namespace narrows
