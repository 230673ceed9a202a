// The loops of one instruction set: the including file gives Peak, with kVectorBytes, kChains (so many that no unit waits for a
// sum) and multiply_add. The rules for inline functions of tile_vectors.inl.hpp hold here too.
#include "cpu/peak_loops.hpp"

namespace narrows::cpu {
namespace {

typedef float Floats __attribute__((vector_size(Peak::kVectorBytes)));
typedef unsigned long long Words __attribute__((vector_size(Peak::kVectorBytes)));

inline Floats splat(float value) { return value - Floats{}; }

float run(long rounds) {
  constexpr int kChains = Peak::kChains;
  Floats sum[kChains];
  for (int i = 0; i < kChains; ++i) sum[i] = splat(2.0F + static_cast<float>(i));
  const Floats factor = splat(kPeakFactor), addend = splat(kPeakAddend);
  for (long round = 0; round < rounds; ++round) {
#pragma GCC unroll 32
    for (int i = 0; i < kChains; ++i) sum[i] = (Floats)Peak::multiply_add(sum[i], factor, addend);
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
  unsigned long long result = 0;
  for (unsigned lane = 0; lane < sizeof(Words) / sizeof(result); ++lane) result ^= folded[0][lane];
  return result;
}

constexpr PeakLoop kRun{2.0 * Peak::kChains * sizeof(Floats) / sizeof(float), run};

}  // namespace
}  // namespace narrows::cpu
