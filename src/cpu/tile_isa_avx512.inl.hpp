// AVX-512 F, DQ, BW and VL, for every set that is made of it. Comes after tile_vectors.inl.hpp with 64 bytes.
#include <immintrin.h>

namespace narrows::cpu {
namespace {

struct Avx512 {
  using F = FloatVector;
  using D = DoubleVector;
  static F fma(F a, F b, F c) { return (F)_mm512_fmadd_ps(a, b, c); }
  static D fma(D a, D b, D c) { return (D)_mm512_fmadd_pd(a, b, c); }
  static F fused(F a, F b, F c) { return fma(a, b, c); }
  static D fused(D a, D b, D c) { return fma(a, b, c); }
  static WordVector product(WordVector a, WordVector b) {
    return (WordVector)_mm512_maskz_mul_epu32(0xff, (__m512i)a, (__m512i)b);
  }
  static F max(F a, F b) { return (F)_mm512_maskz_max_ps(0xffff, a, b); }
  static D max(D a, D b) { return (D)_mm512_maskz_max_pd(0xff, a, b); }

  template <class T> struct Exponent { Vector<T> whole; };
  template <class T> static Exponent<T> split(Vector<T> x) {
    if constexpr (sizeof(T) == sizeof(float))
      return {(F)_mm512_maskz_roundscale_ps(0xffff, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
    else
      return {(D)_mm512_maskz_roundscale_pd(0xff, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  }
  template <class T> static Vector<T> scaled(Vector<T> p, const Exponent<T>& exponent, Vector<T> x) {
    const Vector<T> least = splat(T{1 - Traits<T>::kBias});
    if constexpr (sizeof(T) == sizeof(float))
      return (F)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, least, _CMP_NLT_UQ), p, exponent.whole);
    else
      return (D)_mm512_maskz_scalef_pd(_mm512_cmp_pd_mask(x, least, _CMP_NLT_UQ), p, exponent.whole);
  }

  static F from_half(const unsigned short* source) {
    return (F)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
  }
  static F from_bfloat(const unsigned short* source) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    return (F)_mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, bits), 16);
  }
  static void to_half(F value, unsigned short* out) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                        _mm512_maskz_cvtps_ph(0xffff, value, _MM_FROUND_TO_NEAREST_INT));
  }
};

}  // namespace
}  // namespace narrows::cpu
