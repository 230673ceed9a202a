// AVX2, FMA and F16C: 6 x 2 vectors of accumulators in 16 registers.
#define NARROWS_VECTOR_BYTES 32
#include "cpu/tile_vectors.inl.hpp"

#include <immintrin.h>

namespace narrows::cpu {
namespace {

struct Isa : AddedExponents {
  static constexpr const char* kName = "avx2";
  static constexpr int kRows = 6;

  using F = FloatVector;
  using D = DoubleVector;
  static F fma(F a, F b, F c) { return (F)_mm256_fmadd_ps(a, b, c); }
  static D fma(D a, D b, D c) { return (D)_mm256_fmadd_pd(a, b, c); }
  static F fused(F a, F b, F c) { return fma(a, b, c); }
  static D fused(D a, D b, D c) { return fma(a, b, c); }
  static WordVector product(WordVector a, WordVector b) { return (WordVector)_mm256_mul_epu32((__m256i)a, (__m256i)b); }
  static F max(F a, F b) { return (F)_mm256_max_ps(a, b); }
  static D max(D a, D b) { return (D)_mm256_max_pd(a, b); }
  static F from_half(const unsigned short* source) {
    return (F)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
  }
  static F from_bfloat(const unsigned short* source) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    return (F)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
  }
  static void to_half(F value, unsigned short* out) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  }
};

}  // namespace
}  // namespace narrows::cpu

#include "cpu/tile_kernels.inl.hpp"

namespace narrows::cpu {
constinit const InstructionSet kTileKernelsAvx2{kKernels<float>, kKernels<double>};
}  // namespace narrows::cpu
