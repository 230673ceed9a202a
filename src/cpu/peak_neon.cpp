// Sixteen chains: four units of latency 4 never wait.
#include "cpu/peak_loops.hpp"

#include <arm_neon.h>

namespace narrows::cpu {
namespace {

using Vector = float32x4_t;
constexpr int kChains = 16;

float run(long rounds) {
  Vector sum[kChains];
  for (int i = 0; i < kChains; ++i) sum[i] = vdupq_n_f32(2.0F + static_cast<float>(i));
  const Vector factor = vdupq_n_f32(kPeakFactor), addend = vdupq_n_f32(kPeakAddend);
  for (long round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) sum[i] = vfmaq_f32(addend, sum[i], factor);
  }
  float total = 0;
  for (int i = 0; i < kChains; ++i) total += sum[i][0];
  return total;
}

}  // namespace

const PeakLoop kPeakLoopNeon{2.0 * kChains * sizeof(Vector) / sizeof(float), run};

}  // namespace narrows::cpu
