// 24 chains: two units of latency 4 or 5 never wait, nor would four.
#include <immintrin.h>

namespace narrows::cpu {
namespace {

struct Peak {
  static constexpr int kVectorBytes = 64, kChains = 24;
  static __m512 multiply_add(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
};

}  // namespace
}  // namespace narrows::cpu

#include "cpu/peak_vectors.inl.hpp"

namespace narrows::cpu {
const PeakLoop kPeakLoopAvx512 = kRun;
const ReadLoop kReadLoopAvx512 = read;
}  // namespace narrows::cpu
