// The functions that score.h and merge.h ask of their caller, from the standard library.
#pragma once
#include <cmath>

namespace narrows::test {

template <class T> struct StdMath {
  static T multiply(T a, T b) { return a * b; }
  static T fma(T a, T b, T c) { return std::fma(a, b, c); }
  static T exp2(T x) { return std::exp2(x); }
  static T log2(T x) { return std::log2(x); }
  static T tanh(T x) { return std::tanh(x); }
};

}  // namespace narrows::test
