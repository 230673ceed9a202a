// AVX512-BF16, for the sets that have it. Both instructions read subnormal numbers as zeros and write none. Comes after
// tile_isa_avx512.inl.hpp.

namespace narrows::cpu {
namespace {

struct Avx512Bf16 : Avx512 {
  /// sum + a1 * b1 + a0 * b0 for each pair, rounded after each step, subscript 1 the upper half's.
  static F dot(F sum, IntVector a, IntVector b) { return (F)_mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }
  /// To nearest even.
  static IntVector to_bfloats(F left, F right) { return (IntVector)_mm512_cvtne2ps_pbh(right, left); }
};

}  // namespace
}  // namespace narrows::cpu
