// The tile operations as one text, compiled once for each instruction set after tile_vectors.inl.hpp and the set's Isa. The
// rules for inline functions there hold here too.
#include "cpu/tile_math.inl.hpp"
#include "cpu/tile_packing.inl.hpp"

namespace narrows::cpu {
namespace {

// -------------------------------------------------------------------------------------------------------------- products

// Each accumulator is one chain over x in ascending order, whatever R is: a row's bits do not depend on its panel.
template <class T, int R> void scores_strip(const T* panel, const T* keys, i64 d, T* s, i64 ld) {
  Vector<T> sum[R][2] = {};
  for (i64 x = 0; x < d; ++x, panel += Isa::kRows, keys += kColumns<T>) {
    const Vector<T> left = at(keys), right = at(keys + kLanes<T>);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const Vector<T> q = splat(panel[r]);
      sum[r][0] = Isa::fma(q, left, sum[r][0]);
      sum[r][1] = Isa::fma(q, right, sum[r][1]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    at(s + r * ld) = sum[r][0];
    at(s + r * ld + kLanes<T>) = sum[r][1];
  }
}

// Weights stand at p[r][key], or transposed at p[key][r].
template <class T, int R, int Vectors, bool Transposed>
void accumulate_strip(const T* p, i64 ld, const T* values, i64 keys, T* o, i64 o_ld) {
  Vector<T> sum[R][Vectors];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < Vectors; ++v) sum[r][v] = at(o + r * o_ld + v * kLanes<T>);
  for (i64 key = 0; key < keys; ++key, values += kColumns<T>) {
    Vector<T> value[Vectors];
    for (int v = 0; v < Vectors; ++v) value[v] = at(values + v * kLanes<T>);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const Vector<T> weight = splat(Transposed ? p[key * ld + r] : p[r * ld + key]);
      for (int v = 0; v < Vectors; ++v) sum[r][v] = Isa::fma(weight, value[v], sum[r][v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < Vectors; ++v) at(o + r * o_ld + v * kLanes<T>) = sum[r][v];
}

template <class T, int R> void scores_rows(const T* panel, int count, const T* keys, i64 strips, i64 d, T* s, i64 ld) {
  if constexpr (R > 1) {
    if (count < R) return scores_rows<T, R - 1>(panel, count, keys, strips, d, s, ld);
  }
  for (i64 strip = 0; strip < strips; ++strip)
    scores_strip<T, R>(panel, keys + strip * d * kColumns<T>, d, s + strip * kColumns<T>, ld);
}

template <class T> void scores(const T* panel, int count, const T* keys, i64 strips, i64 d, T* s, i64 ld) {
  scores_rows<T, Isa::kRows>(panel, count, keys, strips, d, s, ld);
}

template <class T, int R, bool Transposed>
void accumulate_rows(const T* p, i64 ld, int count, const T* values, i64 strip_stride, i64 keys, i64 dv, T* o,
                     i64 o_ld) {
  if constexpr (R > 1) {
    if (count < R) return accumulate_rows<T, R - 1, Transposed>(p, ld, count, values, strip_stride, keys, dv, o, o_ld);
  }
  for (i64 from = 0; from < dv; from += kColumns<T>, values += strip_stride) {
    if (dv - from > kLanes<T>)
      accumulate_strip<T, R, 2, Transposed>(p, ld, values, keys, o + from, o_ld);
    else
      accumulate_strip<T, R, 1, Transposed>(p, ld, values, keys, o + from, o_ld);
  }
}

template <class T>
void accumulate(const T* p, i64 ld, int count, const T* values, i64 strip_stride, i64 keys, i64 dv, T* o, i64 o_ld) {
  accumulate_rows<T, Isa::kRows, false>(p, ld, count, values, strip_stride, keys, dv, o, o_ld);
}

template <class T>
void accumulate_transposed(const T* p, i64 ld, int count, const T* values, i64 strip_stride, i64 keys, i64 dv, T* o,
                           i64 o_ld) {
  accumulate_rows<T, Isa::kRows, true>(p, ld, count, values, strip_stride, keys, dv, o, o_ld);
}

// --------------------------------------------------------------------------------------------------------------- softmax

template <class T> Vector<T> ascending() {
  Vector<T> lanes;
  for (int lane = 0; lane < kLanes<T>; ++lane) lanes[lane] = static_cast<T>(lane);
  return lanes;
}

template <class T> void logits(T* s, i64 columns, const ScoreRules<T>& given, T position, const T* bias) {
  const ScoreRules<T> rules = given;  // a copy, which the stores cannot change
  Vector<T> offset = position - ascending<T>();
  for (i64 column = 0; column < columns; column += kLanes<T>, offset -= static_cast<T>(kLanes<T>)) {
    const Vector<T> distance = offset < T{0} ? -offset : offset;
    const Vector<T> added = bias ? at(bias + column) : Vector<T>{};
    const Vector<T> x = logit<VectorMath>(at(s + column), rules, distance, added);
    at(s + column) = added == -kInf<T> ? splat(-kInf<T>) : x;
  }
}

template <class T> T maximum(const T* s, i64 columns) {
  Vector<T> left = at(s), right = at(s + kLanes<T>);
  for (i64 column = kColumns<T>; column < columns; column += kColumns<T>) {
    left = Isa::max(at(s + column), left);
    right = Isa::max(at(s + column + kLanes<T>), right);
  }
  left = Isa::max(left, right);
  T result = -kInf<T>;  // a NaN is no maximum, also where it stands in the first columns
  for (int lane = 0; lane < kLanes<T>; ++lane) result = left[lane] > result ? left[lane] : result;
  return result;
}

template <class T> T sum_of_lanes(Vector<T> sum) {
  alignas(kVectorBytes) T lanes[kLanes<T>];
  at(lanes) = sum;
  for (int half = kLanes<T> / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

// Which of the two sums a column goes to depends on its place in the tile alone. Units and reference come by value: through a
// reference they would be reloaded after every store.
template <class T, bool Near> T weights_of(T* s, i64 columns, Units<T> units, Reference<T> reference) {
  Vector<T> sum[2] = {};
  for (i64 column = 0; column < columns; column += kColumns<T>) {
    for (int half = 0; half < 2; ++half) {
      Vector<T>& x = at(s + column + half * kLanes<T>);
      if constexpr (Near)
        x = exp2_vector<T>(VectorMath::fma(x, units.c, -reference.subtrahend));
      else
        x = exp2_vector<T>(weight_exponent<VectorMath>(units, reference, x));
      sum[half] += x;
    }
  }
  return sum_of_lanes<T>(sum[0] + sum[1]);
}

template <class T> T weights(T* s, i64 columns, const Units<T>& units, const Reference<T>& reference) {
  return reference.base == T{0} ? weights_of<T, true>(s, columns, units, reference)
                                : weights_of<T, false>(s, columns, units, reference);
}

template <class T> void multiply(T* values, i64 count, T factor) {
  for (i64 x = 0; x < count; ++x) values[x] *= factor;
}

// ------------------------------------------------------------------------------------------------------------- gradients

template <class T> void softcap_derivatives(const T* s, i64 columns, const ScoreRules<T>& given, T* out) {
  const ScoreRules<T> rules = given;
  for (i64 column = 0; column < columns; column += kLanes<T>)
    at(out + column) = softcap_derivative(VectorMath::tanh(at(s + column) * rules.scale * rules.inverse_cap));
}

// Near: the reference's factor 1 and base 0, left out, change no bit.
template <class T, bool Near> void gradients_of(T* s, T* dp, i64 columns, BackwardReference<T> reference, T delta) {
  for (i64 column = 0; column < columns; column += kLanes<T>) {
    const Vector<T> x = at(s + column);
    Vector<T> p;
    if constexpr (Near)
      p = exp2_vector<T>(at_most_zero(VectorMath::fma(x, reference.c, -reference.subtrahend)));
    else
      p = exp2_vector<T>(probability_exponent<VectorMath>(reference, x));
    at(s + column) = x == -kInf<T> ? Vector<T>{} : p;
    if (!dp) continue;
    const Vector<T> ds = p * (at(dp + column) - delta);
    at(dp + column) = x == -kInf<T> ? Vector<T>{} : ds;
  }
}

template <class T> void gradients(T* s, T* dp, i64 columns, const BackwardReference<T>& reference, T delta) {
  if (reference.factor == T{1} && reference.base == T{0})
    gradients_of<T, true>(s, dp, columns, reference, delta);
  else
    gradients_of<T, false>(s, dp, columns, reference, delta);
}

template <class T> T distance_sum(const T* ds, i64 columns, T position) {
  Vector<T> offset = position - ascending<T>();
  Vector<T> sum = {};
  for (i64 column = 0; column < columns; column += kLanes<T>, offset -= static_cast<T>(kLanes<T>))
    sum += (offset < T{0} ? -offset : offset) * at(ds + column);
  return sum_of_lanes<T>(sum);
}

template <class T> void multiply_each(T* values, const T* factors, i64 count) {
  for (i64 x = 0; x < count; x += kLanes<T>) at(values + x) *= at(factors + x);
}

template <class T>
constexpr TileKernels<T> kKernels{Isa::kName,
                                  Isa::kRows,
                                  kColumns<T>,
                                  pack_query<T>,
                                  pack_keys<T>,
                                  pack_values<T>,
                                  convert<T>,
                                  all_finite<T>,
                                  scores<T>,
                                  logits<T>,
                                  maximum<T>,
                                  weights<T>,
                                  multiply<T>,
                                  accumulate<T>,
                                  accumulate_transposed<T>,
                                  softcap_derivatives<T>,
                                  gradients<T>,
                                  distance_sum<T>,
                                  multiply_each<T>,
                                  store<T>};

}  // namespace
}  // namespace narrows::cpu
