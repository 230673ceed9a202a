// A product and a sum, not fused: what the portable kernels are made of. Twelve chains of them fit in 16 registers.
#include "cpu/peak_loops.hpp"

namespace narrows::cpu {
namespace {

typedef float Vector __attribute__((vector_size(16)));
constexpr int kChains = 12;

Vector splat(float value) { return value - Vector{}; }

float run(long rounds) {
  Vector sum[kChains];
  for (int i = 0; i < kChains; ++i) sum[i] = splat(1.0F + static_cast<float>(i));
  const Vector factor = splat(kPeakFactor), addend = splat(kPeakAddend);
  for (long round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) sum[i] = sum[i] * factor + addend;
  }
  float total = 0;
  for (int i = 0; i < kChains; ++i) total += sum[i][0];
  return total;
}

}  // namespace

const PeakLoop kPeakLoopPortable{2.0 * kChains * sizeof(Vector) / sizeof(float), run};

}  // namespace narrows::cpu
