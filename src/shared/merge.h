// Joining parts of one row's keys: splits, ring steps, ranks. A part is its normalised output and its natural LSE, or, while
// it is still being summed, a reference and a sum. Math and Units are those of score.h.
#pragma once
#include "shared/score.h"

namespace narrows {

// The largest LSE, and the sum of exp(LSE - largest). Weights are taken relative to the largest, not to the merged LSE: that
// one is rounded, and at |LSE| = 2^20 the weights would no longer sum to 1.
template <class T> struct Merge {
  T largest = -kInfinity<T>;
  T sum = T{0};
};

// exp(lse - largest) in (0, 1]; 0 for an empty part, also when all are empty; NaN for NaN. Equal infinities count alike.
template <class Math, class T> constexpr T relative_weight(T lse, T largest) {
  if (lse == -kInfinity<T>) return T{0};
  if (lse == largest) return T{1};
  return Math::exp2(Math::multiply(lse - largest, static_cast<T>(kLog2e)));
}

// Parts at lse[0], lse[stride], ...; sink is the head's, counted once; -inf is none. The order of parts is the order of
// rounding: keep it fixed. A NaN is no maximum; it arrives through the sum.
template <class Math, class T> constexpr Merge<T> merge_of(const T* lse, i64 parts, i64 stride, T sink) {
  T largest = sink;
  for (i64 part = 0; part < parts; ++part) largest = max_of(largest, lse[part * stride]);
  T sum = relative_weight<Math>(sink, largest);
  for (i64 part = 0; part < parts; ++part) sum += relative_weight<Math>(lse[part * stride], largest);
  return {largest, sum};
}

// exp(lse - merged LSE): what a part's output is multiplied by. Nothing at all was visible: 0.
template <class Math, class T> constexpr T part_weight(const Merge<T>& merge, T lse) {
  const T weight = relative_weight<Math>(lse, merge.largest);
  return merge.sum == T{0} ? T{0} : weight / merge.sum;
}

// A gradient through a weight: none where the weight is 0, whatever the other factor holds.
template <class T> constexpr T contribution(T weight, T output) { return weight == T{0} ? T{0} : weight * output; }

template <class Math, class T> constexpr T merged_lse(const Merge<T>& merge) {
  if (merge.sum == T{0}) return -kInfinity<T>;
  return merge.largest + Math::multiply(Math::log2(merge.sum), static_cast<T>(kLn2));
}

// A row in the making: the weights summed so far, relative to its reference.
template <class T> struct RunningSum {
  Reference<T> reference;
  T sum = T{0};
};

template <class T> struct JoinedSum {
  RunningSum<T> row;
  T left_factor;  // what each side's accumulated output is multiplied by before adding
  T right_factor;
};

template <class Math, class T>
constexpr JoinedSum<T> joined(const Units<T>& units, const RunningSum<T>& left, const RunningSum<T>& right) {
  const Reference<T> reference = reference_of<Math>(units, max_of(left.reference.maximum, right.reference.maximum));
  const T left_factor = Math::exp2(rescale_exponent<Math>(units, left.reference, reference));
  const T right_factor = Math::exp2(rescale_exponent<Math>(units, right.reference, reference));
  return {{reference, left.sum * left_factor + right.sum * right_factor}, left_factor, right_factor};
}

}  // namespace narrows
