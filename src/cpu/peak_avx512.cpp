// Twelve chains: two units of latency 4 never wait.
#include "cpu/peak_loops.hpp"

#include <immintrin.h>

namespace narrows::cpu {
namespace {

using Vector = __m512;
constexpr int kChains = 12;

float run(long rounds) {
  Vector sum[kChains];
  for (int i = 0; i < kChains; ++i) sum[i] = _mm512_set1_ps(1.0F + static_cast<float>(i));
  const Vector factor = _mm512_set1_ps(kPeakFactor), addend = _mm512_set1_ps(kPeakAddend);
  for (long round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) sum[i] = _mm512_fmadd_ps(sum[i], factor, addend);
  }
  float total = 0;
  for (int i = 0; i < kChains; ++i) total += sum[i][0];
  return total;
}

}  // namespace

const PeakLoop kPeakLoopAvx512{2.0 * kChains * sizeof(Vector) / sizeof(float), run};

}  // namespace narrows::cpu
