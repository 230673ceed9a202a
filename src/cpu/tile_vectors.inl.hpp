// The vectors of one instruction set, and elementary functions on them. Compiled once for each: the including file sets
// NARROWS_VECTOR_BYTES. Everything is in an unnamed namespace and no inline function of the standard library is used, since
// the linker keeps one copy of those, and a copy compiled for AVX would fault on a machine without it.
#include "cpu/tile_kernels.hpp"

#ifndef NARROWS_VECTOR_BYTES
#define NARROWS_VECTOR_BYTES 16
#endif

namespace narrows::cpu {
namespace {

constexpr int kVectorBytes = NARROWS_VECTOR_BYTES;
typedef float FloatVector __attribute__((vector_size(kVectorBytes), may_alias));
typedef double DoubleVector __attribute__((vector_size(kVectorBytes), may_alias));
typedef int IntVector __attribute__((vector_size(kVectorBytes), may_alias));
typedef long long LongVector __attribute__((vector_size(kVectorBytes), may_alias));

typedef unsigned long long WordVector __attribute__((vector_size(kVectorBytes)));

template <class T> struct Traits;
template <> struct Traits<float> {
  using Vector = FloatVector;
  using Bits = IntVector;
  using Bit = int;
  static constexpr int kMantissa = 23, kBias = 127;
  static constexpr float kRound = 12582912.f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  // exp2(f) = 1 + f * (...) on [-1/2, 1/2], minimax in relative error (2^-28.5) with the constant term held at 1.
  static constexpr float kExp2[] = {0.69314721540365509067f,   0.24022652809289822131f,   0.055503097063272138579f,
                                    0.0096176892973826750319f, 0.0013406950557476850515f, 0.00015595484104051753922f};
};
template <> struct Traits<double> {
  using Vector = DoubleVector;
  using Bits = LongVector;
  using Bit = long long;
  static constexpr int kMantissa = 52, kBias = 1023;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kExp2[] = {                   // as above, to 2^-55.7
                                     0.6931471805599456885,      0.24022650695910097503,   0.055504108664791100082,
                                     0.009618129107607325968,    0.0013333558153272016197, 0.00015403530441027111371,
                                     0.000015252727547657976849, 1.3215443008017505826e-6, 1.0180579153070637223e-7,
                                     7.0725038281140568823e-9,   4.0885435137673855954e-10};
};

template <class T> using Vector = typename Traits<T>::Vector;
template <class T> constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));
template <class T> constexpr int kColumns = 2 * kLanes<T>;  // of a register tile
template <class T> constexpr T kInf = static_cast<T>(__builtin_huge_valf());

template <class T> inline Vector<T>& at(T* aligned) { return *reinterpret_cast<Vector<T>*>(aligned); }
template <class T> inline const Vector<T>& at(const T* aligned) { return *reinterpret_cast<const Vector<T>*>(aligned); }
// At any address. Not through a vector type of alignment 1: clang forgets that attribute behind a template's alias.
template <class T> inline Vector<T> load_anywhere(const T* p) {
  Vector<T> values;
  __builtin_memcpy(&values, p, sizeof values);
  return values;
}
template <class T> inline void store_anywhere(T* p, Vector<T> values) { __builtin_memcpy(p, &values, sizeof values); }
template <class T> inline Vector<T> splat(T value) { return value - Vector<T>{}; }

// x = whole + f, |f| <= 1/2, and 2^whole as the bits that it adds to a float's exponent. An Isa has both functions, from here
// unless it has instructions for them.
struct AddedExponents {
  template <class T> struct Exponent {
    Vector<T> whole;
    typename Traits<T>::Bits bits;
  };
  template <class T> static Exponent<T> split(Vector<T> x) {
    const Vector<T> shifted = x + Traits<T>::kRound;
    return {shifted - Traits<T>::kRound, (typename Traits<T>::Bits)shifted << Traits<T>::kMantissa};
  }
  /// p * 2^whole, p about 1; 0 where x is below the normal range.
  template <class T> static Vector<T> scaled(Vector<T> p, const Exponent<T>& exponent, Vector<T> x) {
    const Vector<T> result = (Vector<T>)((typename Traits<T>::Bits)p + exponent.bits);
    return x < T{1 - Traits<T>::kBias} ? Vector<T>{} : result;
  }
};

// 16-bit floats, element by element.
inline float bits_to_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline unsigned float_to_bits(float value) { return __builtin_bit_cast(unsigned, value); }

inline float bfloat_to_float(unsigned short value) { return bits_to_float(static_cast<unsigned>(value) << 16); }

inline unsigned short float_to_bfloat(float value) {
  const unsigned bits = float_to_bits(value);
  const unsigned rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const unsigned quiet_nan = (bits >> 16) | 0x40u;
  return static_cast<unsigned short>(value != value ? quiet_nan : rounded);
}

// The half's bits moved to a float's place are its value times 2^-112, also when it is subnormal.
inline float half_to_float(unsigned short value) {
  const unsigned sign = (value & 0x8000u) << 16, magnitude = value & 0x7fffu;
  const float scaled = bits_to_float(magnitude << 13) * bits_to_float(0x77800000u);  // 2^112
  const unsigned special = 0x7f800000u | (magnitude << 13);
  return bits_to_float(sign | (magnitude >= 0x7c00u ? special : float_to_bits(scaled)));
}

inline unsigned short float_to_half(float value) {
  const unsigned sign = (float_to_bits(value) >> 16) & 0x8000u, magnitude = float_to_bits(value) & 0x7fffffffu;
  unsigned half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // 65520 rounds to infinity
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: adding 1/2 puts the unit of rounding, 2^-24, in the last place
    half = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  }
  return static_cast<unsigned short>(sign | half);
}

}  // namespace
}  // namespace narrows::cpu
