// AVX512-BF16's instructions without any, for sets in plain C++: comes after tile_generic.inl.hpp with 64 bytes. Unlike them
// it keeps subnormal numbers.

namespace narrows::cpu {
namespace {

struct GenericBf16 : GenericVectors {
  // A product of two bf16 is exact, so each step rounds once, as the instruction's does.
  static F dot(F sum, IntVector a, IntVector b) {
    constexpr int kUpper = static_cast<int>(0xffff0000u);
    sum = fma((F)(a & kUpper), (F)(b & kUpper), sum);
    return fma((F)(a << 16), (F)(b << 16), sum);
  }
  static IntVector rounded(F value) {  // to the low halves
    const IntVector bits = (IntVector)value;
    const IntVector upper = bits >> 16 & 0xffff;
    const IntVector nearest = (bits + 0x7fff + (upper & 1)) >> 16;
    return value == value ? nearest : (upper | 0x40);
  }
  static IntVector to_bfloats(F left, F right) {
    const IntVector low = rounded(left), high = rounded(right);
    alignas(kVectorBytes) unsigned short halves[kVectorBytes / 2];
    for (int lane = 0; lane < kLanes<float>; ++lane) {
      halves[lane] = static_cast<unsigned short>(low[lane]);
      halves[lane + kLanes<float>] = static_cast<unsigned short>(high[lane]);
    }
    IntVector both;
    __builtin_memcpy(&both, halves, sizeof both);
    return both;
  }
};

}  // namespace
}  // namespace narrows::cpu
