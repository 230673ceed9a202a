// The functions that score.h and merge.h ask of their caller, from the standard library, and what tests of them share.
#pragma once

#include <cmath>
#include <limits>

namespace narrows::test {

inline constexpr float kNegInf = -std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

template <class T> struct StdMath {
  static T multiply(T a, T b) { return a * b; }
  static T fma(T a, T b, T c) { return std::fma(a, b, c); }
  static T exp2(T x) { return std::exp2(x); }
  static T log2(T x) { return std::log2(x); }
  static T tanh(T x) { return std::tanh(x); }
};

}  // namespace narrows::test
