// What an instruction set gives beyond + - * /, without any: comes after tile_vectors.inl.hpp.

namespace narrows::cpu {
namespace {

struct GenericVectors : AddedExponents {
  using F = FloatVector;
  using D = DoubleVector;
  static F fma(F a, F b, F c) { return a * b + c; }
  static D fma(D a, D b, D c) { return a * b + c; }
  static WordVector product(WordVector a, WordVector b) { return a * b; }  // of 32-bit values
  static F max(F a, F b) { return a > b ? a : b; }
  static D max(D a, D b) { return a > b ? a : b; }

  // Without a fused instruction: a double holds the product of two floats exactly.
  static F fused(F a, F b, F c) {
    typedef double Wide __attribute__((vector_size(2 * kVectorBytes)));
    const Wide sum =
        __builtin_convertvector(a, Wide) * __builtin_convertvector(b, Wide) + __builtin_convertvector(c, Wide);
    return __builtin_convertvector(sum, F);
  }
  static D fused(D a, D b, D c) {
    D result;
    for (int lane = 0; lane < kLanes<double>; ++lane) result[lane] = __builtin_fma(a[lane], b[lane], c[lane]);
    return result;
  }
  static F from_half(const unsigned short* source) {
    F result;
    for (int lane = 0; lane < kLanes<float>; ++lane) result[lane] = half_to_float(source[lane]);
    return result;
  }
  static F from_bfloat(const unsigned short* source) {
    F result;
    for (int lane = 0; lane < kLanes<float>; ++lane) result[lane] = bfloat_to_float(source[lane]);
    return result;
  }
  static void to_half(F value, unsigned short* out) {
    for (int lane = 0; lane < kLanes<float>; ++lane) out[lane] = float_to_half(value[lane]);
  }
};

}  // namespace
}  // namespace narrows::cpu
