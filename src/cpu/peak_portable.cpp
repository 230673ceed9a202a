// A product and a sum, not fused: what the portable kernels are made of. Twelve chains of them fit in 16 registers.
#include "cpu/peak_loops.hpp"

namespace narrows::cpu {
namespace {

typedef float Vector __attribute__((vector_size(16)));
typedef unsigned long long Words __attribute__((vector_size(16)));
constexpr int kChains = 12;

Vector splat(float value) { return value - Vector{}; }

float run(long rounds) {
  Vector sum[kChains];
  for (int i = 0; i < kChains; ++i) sum[i] = splat(2.0F + static_cast<float>(i));
  const Vector factor = splat(kPeakFactor), addend = splat(kPeakAddend);
  for (long round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) sum[i] = sum[i] * factor + addend;
  }
  float total = 0;
  for (int i = 0; i < kChains; ++i) total += sum[i][0];
  return total;
}

unsigned long long read(const void* memory, long blocks) {
  constexpr int kLoads = 8, kLoadsOfBlock = kReadBlock / sizeof(Words);
  const auto* at = static_cast<const Words*>(memory);
  Words folded[kLoads] = {};
  for (long block = 0; block < blocks; ++block) {
#pragma GCC unroll 32
    for (int i = 0; i < kLoadsOfBlock; ++i) folded[i % kLoads] ^= at[i];
    at += kLoadsOfBlock;
  }
  for (int i = 1; i < kLoads; ++i) folded[0] ^= folded[i];
  return folded[0][0] ^ folded[0][1];
}

}  // namespace

const PeakLoop kPeakLoopPortable{2.0 * kChains * sizeof(Vector) / sizeof(float), run};
const ReadLoop kReadLoopPortable = read;

}  // namespace narrows::cpu
