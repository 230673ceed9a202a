// Twelve chains, which with two constants fit in 16 registers: two units of latency 4 or 5 never wait.
#include "cpu/peak_loops.hpp"

#include <immintrin.h>

namespace narrows::cpu {
namespace {

using Vector = __m256;
constexpr int kChains = 12;

float run(long rounds) {
  Vector sum[kChains];
  for (int i = 0; i < kChains; ++i) sum[i] = _mm256_set1_ps(2.0F + static_cast<float>(i));
  const Vector factor = _mm256_set1_ps(kPeakFactor), addend = _mm256_set1_ps(kPeakAddend);
  for (long round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) sum[i] = _mm256_fmadd_ps(sum[i], factor, addend);
  }
  float total = 0;
  for (int i = 0; i < kChains; ++i) total += sum[i][0];
  return total;
}

unsigned long long read(const void* memory, long blocks) {
  constexpr int kLoads = 8, kLoadsOfBlock = kReadBlock / sizeof(__m256i);
  const auto* at = static_cast<const __m256i*>(memory);
  __m256i folded[kLoads] = {};
  for (long block = 0; block < blocks; ++block) {
#pragma GCC unroll 16
    for (int i = 0; i < kLoadsOfBlock; ++i)
      folded[i % kLoads] = _mm256_xor_si256(folded[i % kLoads], _mm256_load_si256(at + i));
    at += kLoadsOfBlock;
  }
  for (int i = 1; i < kLoads; ++i) folded[0] = _mm256_xor_si256(folded[0], folded[i]);
  unsigned long long result = 0;
  for (int lane = 0; lane < 4; ++lane) result ^= static_cast<unsigned long long>(folded[0][lane]);
  return result;
}

}  // namespace

const PeakLoop kPeakLoopAvx2{2.0 * kChains * sizeof(Vector) / sizeof(float), run};
const ReadLoop kReadLoopAvx2 = read;

}  // namespace narrows::cpu
