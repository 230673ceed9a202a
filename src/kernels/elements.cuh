// Element types: single values to and from fp32, and pairs for the matrix products.
#pragma once
#include "config.cuh"
#include "kernels/ptx_sm80.cuh"
#include "shared/call_args.h"

namespace narrows {

constexpr int element_bytes(Element element) { return element == Element::fp64 ? 8 : element == Element::fp32 ? 4 : 2; }
constexpr int kElementBytes = element_bytes(kElement);

constexpr float kHidden = -kInfinity<float>;  // logit of a key that a row does not see

inline float load_element(const char* at, Element element) {
  switch (element) {
    case Element::fp16: return widen_fp16(*reinterpret_cast<const unsigned short*>(at));
    case Element::bf16: return as_float(u32{*reinterpret_cast<const unsigned short*>(at)} << 16);
    case Element::fp64: return static_cast<float>(*reinterpret_cast<const double*>(at));
    default: return *reinterpret_cast<const float*>(at);
  }
}

// The other way, for single numbers of any type.
inline void store_number(char* at, Element element, float x) {
  switch (element) {
    case Element::fp16: *reinterpret_cast<unsigned short*>(at) = static_cast<unsigned short>(pack_fp16(x, 0.f)); break;
    case Element::bf16: *reinterpret_cast<unsigned short*>(at) = static_cast<unsigned short>(pack_bf16(x, 0.f)); break;
    case Element::fp64: *reinterpret_cast<double*>(at) = x; break;
    default: *reinterpret_cast<float*>(at) = x;
  }
}

// a.b of what a register holds: two 16-bit elements, or one of fp32.
inline float dot_of_word(u32 a, u32 b) {
  if constexpr (kElement == Element::fp32) return as_float(a) * as_float(b);
  if constexpr (kElement == Element::fp16) {
    const auto half = [](u32 x) { return widen_fp16(static_cast<unsigned short>(x)); };
    return half(a) * half(b) + half(a >> 16) * half(b >> 16);
  }
  return as_float(a << 16) * as_float(b << 16) + as_float(a & 0xffff0000u) * as_float(b & 0xffff0000u);
}

// Two 16-bit elements in one register, the first in its low half.
inline u32 pack(float first, float second) {
  return kElement == Element::fp16 ? pack_fp16(first, second) : pack_bf16(first, second);
}

// Two neighbours to a tile in shared memory.
inline void store_pair(u32 at, float first, float second) {
  if constexpr (kElement == Element::fp32)
    store_shared64(at, as_bits(first), as_bits(second));
  else
    store_shared(at, pack(first, second));
}

struct ScalarMath {
  static float multiply(float a, float b) { return __fmul_rn(a, b); }
  static float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
  static float exp2(float x) { return exp2_approx(x); }
  static float log2(float x) { return log2_approx(x); }
  // The approximation is good to 2^-11. Exact: an odd polynomial where 1 - 2 / (1 + exp(2x)) would cancel.
  static float tanh(float x) {
    if constexpr (kElement != Element::fp32) return tanh_approx(x);
    const float y = x * x;
    if (y < 0.16f) {
      const float tail =
          __fmaf_rn(y, __fmaf_rn(y, __fmaf_rn(y, __fmaf_rn(y, -0.00886323f, 0.02186949f), -0.05396825f), 0.13333333f),
                    -0.33333333f);
      return __fmaf_rn(x * y, tail, x);
    }
    return 1.f - 2.f / (1.f + exp2_approx(x * static_cast<float>(2 * kLog2e)));
  }
};

}  // namespace narrows
