// Advanced SIMD, part of the baseline of AArch64: 10 x 2 vectors of accumulators. With 12 x 2 g++ 12, which loads all rows of a
// column ahead, spills in the loop.
#include "cpu/tile_vectors.inl.hpp"

#include <arm_neon.h>

namespace narrows::cpu {
namespace {

struct Isa : AddedExponents {
  static constexpr const char* kName = "neon";
  static constexpr int kRows = 10;

  using F = FloatVector;
  using D = DoubleVector;
  static F fma(F a, F b, F c) { return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
  static D fma(D a, D b, D c) { return (D)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b); }
  static F fused(F a, F b, F c) { return fma(a, b, c); }
  static D fused(D a, D b, D c) { return fma(a, b, c); }
  static WordVector product(WordVector a, WordVector b) {
    return (WordVector)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
  }
  // The number where the other is a NaN.
  static F max(F a, F b) { return (F)vmaxnmq_f32((float32x4_t)a, (float32x4_t)b); }
  static D max(D a, D b) { return (D)vmaxnmq_f64((float64x2_t)a, (float64x2_t)b); }
  static F from_half(const unsigned short* source) { return (F)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(source))); }
  static F from_bfloat(const unsigned short* source) { return (F)vshlq_n_u32(vmovl_u16(vld1_u16(source)), 16); }
  static void to_half(F value, unsigned short* out) {
    vst1_u16(out, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)value)));
  }
};

}  // namespace
}  // namespace narrows::cpu

#include "cpu/tile_kernels.inl.hpp"

namespace narrows::cpu {
constinit const InstructionSet kTileKernelsNeon{kKernels<float>, kKernels<double>};
}  // namespace narrows::cpu
