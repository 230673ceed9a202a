// Twelve chains, which with two constants fit in 16 registers: two units of latency 4 or 5 never wait.
#include <immintrin.h>

namespace narrows::cpu {
namespace {

struct Peak {
  static constexpr int kVectorBytes = 32, kChains = 12;
  static __m256 multiply_add(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
};

}  // namespace
}  // namespace narrows::cpu

#include "cpu/peak_vectors.inl.hpp"

namespace narrows::cpu {
const PeakLoop kPeakLoopAvx2 = kRun;
const ReadLoop kReadLoopAvx2 = read;
}  // namespace narrows::cpu
