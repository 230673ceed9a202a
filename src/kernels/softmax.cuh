// Online softmax of the rows of scores that a lane holds a quarter of. The numerics are score.h's; here they are laid
// out so that the common case, fused units and rows that are near, costs no more than its exponentials.
//
// What includes this has a kernel's Scores, kRows of them in a lane, kKeyTiles and kHidden.
#pragma once
#include "kernels/elements.cuh"

namespace narrows {

// References start to be looked at here, so that leaving `far` is seen like entering it.
constexpr float kNearlyFar = kFar / 2;

struct Softmax {
  float maximum[kRows];  // of the row's scores so far
  float sum[kRows];      // of this lane's weights, relative to the row's reference

  Softmax() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) maximum[r] = kHidden, sum[r] = 0.f;
  }
};

inline float row_maximum(const Scores& s, int r) {
  float most = s[r / 2][0][r % 2 * 2];
#pragma unroll
  for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) most = fmaxf(most, s[r / 2][j][r % 2 * 2 + e]);
  return quad_max(most);
}

// Natural units and rows far out: s - base takes the place of s.
inline void subtract_base(Scores& s, int r, float base) {
#pragma unroll
  for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) s[r / 2][j][r % 2 * 2 + e] -= base;
}

// Takes the maxima of a tile's scores in. factor: for what was accumulated before, which is relative to the reference
// of before. subtrahend: of the weights' exponents, fma(s, c, -subtrahend).
inline void raise_reference(Softmax& softmax, Scores& s, float (&factor)[kRows], float (&subtrahend)[kRows],
                            const Units<float>& units) {
  float old[kRows];
  bool look_closer = kNatural;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    old[r] = softmax.maximum[r];
    softmax.maximum[r] = fmaxf(old[r], row_maximum(s, r));
    const float reference = ScalarMath::multiply(softmax.maximum[r], units.c);
    subtrahend[r] = softmax.maximum[r] == kHidden ? 0.f : reference;
    factor[r] = exp2_approx(ScalarMath::multiply(old[r], units.c) - subtrahend[r]);
    look_closer |= !(fabsf(subtrahend[r]) <= kNearlyFar);
  }
  if (kNatural || __any_sync(~0u, look_closer)) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Reference<float> before = reference_of<ScalarMath>(units, old[r]);
      const Reference<float> now = reference_of<ScalarMath>(units, softmax.maximum[r]);
      factor[r] = exp2_approx(rescale_exponent<ScalarMath>(units, before, now));
      subtrahend[r] = now.subtrahend;
      subtract_base(s, r, now.base);
    }
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) softmax.sum[r] *= factor[r];
}

// Scores of the columns of tiles [begin, end) become weights.
template <int begin = 0, int end = kKeyTiles>
inline void weigh(Softmax& softmax, Scores& s, const float (&subtrahend)[kRows], const Units<float>& units) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    float part[2] = {0.f, 0.f};
#pragma unroll
    for (int j = begin; j < end; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[r / 2][j][r % 2 * 2 + e];
        x = exp2_approx(__fmaf_rn(x, units.c, -subtrahend[r]));
        part[e] += x;
      }
    softmax.sum[r] += part[0] + part[1];
  }
}

template <int kTiles, int kColumnTiles>
inline void scale_rows(float (&o)[kTiles][kColumnTiles][4], const float (&factor)[2 * kTiles]) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[t][n][i] *= factor[2 * t + i / 2];
}

// Of a whole row: its LSE, and what its accumulated weights @ V is multiplied by.
struct RowResult {
  float lse, factor;
};

// A sink is one more weight. Relative to the row's reference, like the others: an fp32 LSE of 10^4 has lost 10^-3 of
// it.
inline RowResult row_result(const Units<float>& units, float maximum, float sum, const TensorArg& sinks, i32 head) {
  const Reference<float> found = reference_of<ScalarMath>(units, maximum);
  const float lse = log_sum_exp<ScalarMath>(units, found, sum), factor = normalizer(sum);
  if (sinks.data == nullptr) return {lse, factor};
  const float sink = load_element(sinks.data + head * sinks.strides[0], sinks.element);
  if (sink == kHidden) return {lse, factor};
  if (sum == 0.f) return {sink, 0.f};
  const float log2e = static_cast<float>(kLog2e), rest = static_cast<float>(kLog2e - static_cast<double>(log2e));
  const float above = sink - ScalarMath::multiply(units.scale, found.base);
  const float exponent = __fmaf_rn(above, log2e, -found.subtrahend) + above * rest, own = log2_approx(sum);
  const float most = fmaxf(exponent, own), share = exp2_approx(own - most), both = share + exp2_approx(exponent - most);
  const float merged = log_sum_exp<ScalarMath>(units, {found.maximum, found.base, found.subtrahend + most}, both);
  return {merged, factor * share / both};
}

// Of row `row` of a block.
inline RowResult row_result(const CallArgs& args, const QueryBlock& block, i32 row, float maximum, float sum) {
  const float nan = as_float(0x7fffffffu);
  RowResult result = row_result(args.units, maximum, sum, args.sinks, block.head);
  if (block.first_row + row >= block.queries) result = {kHidden, 0.f};  // no query: no sink either
  if (block.broken) result = {nan, nan};
  if constexpr (kDropout) result.factor *= keep_factor<float>(args.dropout);
  return result;
}
// Whose lanes have the sum in parts.
inline RowResult row_result(const CallArgs& args, const QueryBlock& block, i32 row, const Softmax& softmax, int r) {
  return row_result(args, block, row, softmax.maximum[r], quad_sum(softmax.sum[r]));
}

// By one lane of the row's quad.
inline void store_lse(const TensorArg& to, const QueryBlock& block, i32 row, float lse, int of_quad = 0) {
  if (to.data == nullptr || static_cast<int>(threadIdx.x % 4) != of_quad || row >= block.rows) return;
  const i64 i = block.first_query + block.first_row + row;
  *reinterpret_cast<float*>(to.data + block.sequence * to.strides[0] + block.head * to.strides[1] + i * to.strides[2]) =
      lse;
}

}  // namespace narrows
