// 24 chains: two units of latency 4 or 5 never wait, nor would four.
#include "cpu/peak_loops.hpp"

#include <immintrin.h>

namespace narrows::cpu {
namespace {

using Vector = __m512;
constexpr int kChains = 24;

float run(long rounds) {
  Vector sum[kChains];
  for (int i = 0; i < kChains; ++i) sum[i] = _mm512_set1_ps(2.0F + static_cast<float>(i));
  const Vector factor = _mm512_set1_ps(kPeakFactor), addend = _mm512_set1_ps(kPeakAddend);
  for (long round = 0; round < rounds; ++round) {
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) sum[i] = _mm512_fmadd_ps(sum[i], factor, addend);
  }
  float total = 0;
  for (int i = 0; i < kChains; ++i) total += sum[i][0];
  return total;
}

unsigned long long read(const void* memory, long blocks) {
  constexpr int kLoads = 8, kLoadsOfBlock = kReadBlock / sizeof(__m512i);
  const auto* at = static_cast<const __m512i*>(memory);
  __m512i folded[kLoads] = {};
  for (long block = 0; block < blocks; ++block) {
#pragma GCC unroll 32
    for (int i = 0; i < kLoadsOfBlock; ++i)
      folded[i % kLoads] = _mm512_xor_si512(folded[i % kLoads], _mm512_load_si512(at + i));
    at += kLoadsOfBlock;
  }
  for (int i = 1; i < kLoads; ++i) folded[0] = _mm512_xor_si512(folded[0], folded[i]);
  unsigned long long result = 0;
  for (int lane = 0; lane < 8; ++lane) result ^= static_cast<unsigned long long>(folded[0][lane]);
  return result;
}

}  // namespace

const PeakLoop kPeakLoopAvx512{2.0 * kChains * sizeof(Vector) / sizeof(float), run};
const ReadLoop kReadLoopAvx512 = read;

}  // namespace narrows::cpu
