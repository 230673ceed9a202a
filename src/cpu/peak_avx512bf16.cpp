// 24 chains of dot products of bf16 pairs, as many as with two operands fit in 32 registers: two units of latency 6 never
// wait.
#include "cpu/peak_loops.hpp"

#include <immintrin.h>

namespace narrows::cpu {
namespace {

constexpr int kChains = 24, kLanes = 16;

float run(long rounds) {
  __m512 sum[kChains];
  for (int i = 0; i < kChains; ++i) sum[i] = _mm512_set1_ps(static_cast<float>(i));
  // Pairs of 1 and 0.5 by pairs of 0.5 and 1 in bf16: every round adds 1.
  const __m512bh one_half = (__m512bh)_mm512_set1_epi32(0x3F003F80), half_one = (__m512bh)_mm512_set1_epi32(0x3F803F00);
  for (long round = 0; round < rounds; ++round) {
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) sum[i] = _mm512_dpbf16_ps(sum[i], one_half, half_one);
  }
  float total = 0;
  for (int i = 0; i < kChains; ++i) total += sum[i][0];
  return total;
}

}  // namespace

const PeakLoop kPeakLoopAvx512Bf16{4.0 * kChains * kLanes, run};

}  // namespace narrows::cpu
