// From a dot product to a probability: the score rules in the contract's order, and the numerics of the online softmax.
//
// Math is the caller's set of functions: static multiply(a, b) (one rounding, never fused with a following sum), fma, exp2,
// log2 and tanh. No spelling of these compiles without an include in all three compilers (NVRTC has no __builtin_fmaf, the
// others no fmaf), and only the caller knows the fast ones. T is float or double; S, of scores, is T or a vector of T whose
// Math::fma takes (S, T, T).
#pragma once
#include "shared/params.h"

namespace narrows {

constexpr double kLog2e = 1.44269504088896340736;
constexpr double kLn2 = 0.69314718055994530942;

template <class T> constexpr T kInfinity = static_cast<T>(__builtin_bit_cast(float, 0x7f800000u));

template <class T>
constexpr double kLargest = sizeof(T) == sizeof(float) ? 3.4028234663852886e38 : 1.7976931348623157e308;

// 2^24: beyond it the rounding of a reference exceeds 1. An LSE enters the backward pass multiplied by log2(e) and rounded
// once more, so its limit is 2^23.
constexpr float kFar = 16777216.f;
constexpr float kFarLse = 8388608.f;

template <class T> constexpr T magnitude(T x) { return x < T{0} ? -x : x; }

// The nearest finite T: a finite option stays finite in the arithmetic's type.
template <class T> constexpr T fitted(double x) { return static_cast<T>(clamp_to(x, -kLargest<T>, kLargest<T>)); }

// ---------------------------------------------------------------------------------------------------------- score rules

// What happens to q.k before the mask. cap 0 and slope 0 are none.
template <class T> struct ScoreRules {
  T scale = T{1};
  T cap = T{0};
  T inverse_cap = T{0};
  T slope = T{0};
};

// A cap that fp32 cannot hold becomes its smallest normal number: it must not turn into none.
template <class T> constexpr ScoreRules<T> score_rules(double scale, double softcap, T slope) {
  if (softcap == 0) return {fitted<T>(scale), T{0}, T{0}, slope};
  const double cap = clamp_to(softcap, 1.1754943508222875e-38, kLargest<T>);
  return {fitted<T>(scale), static_cast<T>(cap), static_cast<T>(1 / cap), slope};
}

// ALiBi's |p - j|; below 2^24 it is exact in fp32.
constexpr i64 distance(i64 p, i64 j) { return p < j ? j - p : p - j; }

// dot -> scale -> softcap -> ALiBi -> bias.
template <class Math, class S, class T> constexpr S logit(S dot, const ScoreRules<T>& rules, S distance, S bias) {
  S x = dot * rules.scale;
  if (rules.cap != T{0}) x = Math::tanh(x * rules.inverse_cap) * rules.cap;
  return x - distance * rules.slope + bias;
}

// d softcap(x) / dx from t = tanh(x / cap). As a product: 1 - t * t would lose the digits of a t close to 1.
template <class S> constexpr S softcap_derivative(S t) { return (1 - t) * (1 + t); }

// ------------------------------------------------------------------------------------------------------- online softmax

// The units that a row's scores s are in: logit = scale * s, and weight = exp2((s - maximum) * c).
// Fused units leave the scale to the exponent: c = scale * log2(e). Every score must have been multiplied by `sign` (in Q is
// cheapest, and exact), so that c > 0 and a masked -inf stays one; sign 0 is a scale of 0, which c = 0 would turn into
// -inf * 0. Natural units are for logits that the score rules have made.
template <class T> struct Units {
  T sign = T{1};
  T c = static_cast<T>(kLog2e);
  T scale = T{1};
  bool natural = true;
};

template <class T> constexpr Units<T> natural_units() { return {}; }

template <class T> constexpr Units<T> fused_units(double scale) {
  const double size = scale < 0 ? -scale : scale;
  const T c = fitted<T>(clamp_to(size, 0.0, kLargest<T>) * kLog2e);
  if (c == T{0}) return {T{0}, static_cast<T>(kLog2e), T{1}, false};
  return {scale < 0 ? T{-1} : T{1}, c, fitted<T>(size), false};
}

// What a row's weights are relative to: exp2(base * c + subtrahend). Near: base 0, subtrahend M = maximum * c, rounded once
// and never recomputed, so that its rounding cancels between weights, rescale factors and LSE. Far, where that rounding
// exceeds 1, and in natural units: base is the maximum, subtrahend 0. A row without keys is near with M = 0.
template <class T> struct Reference {
  T maximum = -kInfinity<T>;
  T base = T{0};
  T subtrahend = T{0};
};

template <class Math, class T> constexpr Reference<T> reference_of(const Units<T>& units, T maximum) {
  if (maximum == -kInfinity<T>) return {};
  const T product = Math::multiply(maximum, units.c);
  if (units.natural || magnitude(product) > T{kFar}) return {maximum, maximum, T{0}};
  return {maximum, T{0}, product};
}

// Base-2 exponent of a score's weight: fma(s, c, -M) near, (s - m) * c far, by one expression since the other form's part is
// an exact 0. A kernel that knows its rows near may leave out the subtraction and gets the same bits.
template <class Math, class S, class T>
constexpr S weight_exponent(const Units<T>& units, const Reference<T>& reference, S s) {
  return Math::fma(s - reference.base, units.c, -reference.subtrahend);
}

// Base-2 exponent of the factor that takes what was summed relative to `old` to `current`, in any pair of forms:
// M - M', (m - m') * c, fma(-m', c, M), fma(m, c, -M'). Nothing was summed yet: factor 0, as -M' may be huge.
template <class Math, class T>
constexpr T rescale_exponent(const Units<T>& units, const Reference<T>& old, const Reference<T>& current) {
  if (old.maximum == -kInfinity<T>) return -kInfinity<T>;
  return Math::fma(old.base - current.base, units.c, old.subtrahend - current.subtrahend);
}

// Natural LSE of a row from its reference and the sum of its weights. Empty is a sum of exactly 0, whatever an approximate
// log2 makes of it; NaN stays NaN.
template <class Math, class T> constexpr T log_sum_exp(const Units<T>& units, const Reference<T>& reference, T sum) {
  if (sum == T{0}) return -kInfinity<T>;
  const T rest = Math::multiply(reference.subtrahend + Math::log2(sum), static_cast<T>(kLn2));
  return Math::fma(reference.base, units.scale, rest);
}

// What a row's accumulated weights @ V is multiplied by at the end.
template <class T> constexpr T normalizer(T sum) { return sum == T{0} ? T{0} : T{1} / sum; }

// ------------------------------------------------------------------------------------------------------------- backward

// Keeps NaN, which a minimum would drop.
template <class S> constexpr S at_most_zero(S x) { return x > S{} ? S{} : x; }

// How the backward pass makes P from a row's LSE. An fp32 LSE leaves P a relative error of |LSE| 2^-24.
template <class T> struct BackwardReference {
  T factor = T{1};
  T base = T{0};
  T c = T{1};
  T subtrahend = T{0};
};

// An empty row weighs no key, whatever its scores are.
template <class Math, class T> constexpr BackwardReference<T> backward_reference(const Units<T>& units, T lse) {
  if (lse == -kInfinity<T>) return {T{1}, T{0}, units.c, kInfinity<T>};
  const T log2e = static_cast<T>(kLog2e);
  if (units.natural || magnitude(lse) > T{kFarLse}) return {units.scale, lse, log2e, T{0}};
  return {T{1}, T{0}, units.c, Math::multiply(lse, log2e)};
}

// Base-2 exponent of P: min(0, fma(s, c, -LSE log2e)), or min(0, (scale * s - LSE) log2e) far and in natural units. The
// product there is rounded as the forward pass rounded it into the LSE, so a key that has all the weight gets exactly 1.
template <class Math, class S, class T> constexpr S probability_exponent(const BackwardReference<T>& reference, S s) {
  const S x = Math::multiply(s, reference.factor);
  return at_most_zero(Math::fma(x - reference.base, reference.c, -reference.subtrahend));
}

}  // namespace narrows
