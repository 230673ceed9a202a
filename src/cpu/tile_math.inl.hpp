// Elementary functions on the vectors of one instruction set, after its Isa.

namespace narrows::cpu {
namespace {

// 2^x: 0 below the normal range, NaN for NaN; x at most about 100.
template <class T> inline Vector<T> exp2_vector(Vector<T> x) {
  using Facts = Traits<T>;
  constexpr int kTerms = static_cast<int>(sizeof(Facts::kExp2) / sizeof(T));
  const auto exponent = Isa::template split<T>(x);
  const Vector<T> f = x - exponent.whole;
  Vector<T> series = splat(Facts::kExp2[kTerms - 1]);
  for (int term = kTerms - 2; term >= 0; --term) series = Isa::fma(series, f, splat(Facts::kExp2[term]));
  return Isa::template scaled<T>(Isa::fma(series, f, splat(T{1})), exponent, x);
}

inline FloatVector tanh_vector(FloatVector x) {
  const FloatVector size = x < 0.f ? -x : x;
  // y + y^3 (...) up to 0.7, minimax in relative error (2^-26).
  const FloatVector square = x * x;
  constexpr float kTerms[] = {-0.0051386628326249028282f, 0.02009197086672725174f, -0.053558861651476580419f,
                              0.13329110743987422258f, -0.33333189900403478212f};
  FloatVector series = splat(kTerms[0]);
  for (int term = 1; term < 5; ++term) series = Isa::fma(series, square, splat(kTerms[term]));
  const FloatVector small = Isa::fma(x * square, series, x);
  const FloatVector capped = size > 10.f ? splat(10.f) : size;  // tanh rounds to 1 from 9.02 on
  const FloatVector large = 1.f - 2.f / (exp2_vector<float>(capped * 2.885390081777927f) + 1.f);
  return size < 0.7f ? small : (x < 0.f ? -large : large);
}

inline DoubleVector tanh_vector(DoubleVector x) {
  for (int lane = 0; lane < kLanes<double>; ++lane) x[lane] = __builtin_tanh(x[lane]);
  return x;
}

struct VectorMath {
  template <class S> static S tanh(S x) { return tanh_vector(x); }
  template <class S, class T> static S fma(S x, T factor, T sum) { return Isa::fused(x, splat(factor), splat(sum)); }
  template <class S, class T> static S multiply(S x, T factor) { return x * factor; }
};

}  // namespace
}  // namespace narrows::cpu
