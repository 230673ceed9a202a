// P^T and dS^T of a step in the accumulators and operands of a thread.
#pragma once
#include "kernels/backward_steps_sm90.cuh"

namespace narrows {

// P^T or dS^T of a step as the first operand of dV or dK.
using Operands = u32[kBlockQueries / 16][4];

// The functions of tiles [begin, end) of 8 queries are for a kernel that does something else between.
template <int begin = 0, int end = kQueryTiles> inline void pack_operands(Operands& a, const Scores& s) {
#pragma unroll
  for (int i = begin / 2; i < end / 2; ++i)
#pragma unroll
    for (int n = 0; n < 4; ++n) a[i][n] = pack(s[0][2 * i + n / 2][n % 2 * 2], s[0][2 * i + n / 2][n % 2 * 2 + 1]);
}

// To a tile, whose row `row` the lane gives a matrix's address of. Along a row the swizzle is an exclusive or of address bits.
template <SmemTile tile> inline void store_operands(const Operands& a, u32 to, int row) {
  const u32 first = tile.offset(row, static_cast<int>(threadIdx.x) % kWarp / 16);
#pragma unroll
  for (int i = 0; i < kBlockQueries / 16; ++i) {
    const u32 chunk = tile.offset(0, i / 4 * 8), within = static_cast<u32>(i % 4 * 2 * kUnitBytes);
    store_matrices(to + chunk + (first ^ within), a[i][0], a[i][1], a[i][2], a[i][3]);
  }
}

// Two neighbouring queries of each of two tiles of 8, j and j + 1: references, or behind these deltas.
struct FourFacts {
  u32 words[4];

  FourFacts(u32 facts, int j) {
    load_shared128(facts + static_cast<u32>(32 * j) + threadIdx.x % 4 * 16, words[0], words[1], words[2], words[3]);
  }
  float operator()(int tile, int e) const { return as_float(words[tile % 2 * 2 + e]); }
};

// |p - j| of each score of a lane.
struct Distances {
  float first;

  // first_key: of the thread block, within the sequence.
  Distances(const KeyBlock& block, i32 first_key, i32 first_row) {
    const LanePlace place;
    first = static_cast<float>(first_row + place.query(0, 0) + block.shift - first_key - place.key(0));
  }
  float operator()(int tile, int i) const { return fabsf(first + static_cast<float>(8 * tile + i % 2 - i / 2 * 8)); }
};

inline void hide_rows(Scores& s, const Facts& facts, i32 first_row) {
  const LanePlace place;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Rows rows = facts.rows[place.key(r)];
    const u32 begin = static_cast<u32>(rows.begin - first_row - place.query(0, 0));
    const u32 count = static_cast<u32>(rows.end - rows.begin);
#pragma unroll
    for (int j = 0; j < kQueryTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (static_cast<u32>(8 * j + e) - begin >= count) s[0][j][r * 2 + e] = kHidden;
  }
}

// Scores of rows whose LSE is far out become differences to it: their reference is 0.
inline void bring_near(Scores& s, const BackwardSm90Args& args, const KeyBlock& block, const Place& place) {
  const i32 first_row = place.tile * kBlockQueries;
  const i64 row = block.first_query + first_row;
  const char* const lse = args.lse.data + block.sequence * args.lse.strides[0] + place.head * args.lse.strides[1] +
                          row * args.lse.strides[2];
  const float inverse = 1.f / args.units.scale;
  each_score(s, [&](int, int j, int e, float& x) {
    const i32 query = LanePlace().query(j, e);
    if (first_row + query >= block.queries) return;
    const float own = *reinterpret_cast<const float*>(lse + query * args.lse.strides[2]);
    if (is_far(own)) x = (__fmul_rn(x, args.units.scale) - own) * inverse;
  });
}

// Scores that the products alone do not give. first_key: of the warpgroup, among the thread block's.
inline void correct_scores(Scores& s, const BackwardSm90Args& args, const Facts& facts, int first_key,
                           const Place& place) {
  const i32 first_row = place.tile * kBlockQueries;
  const Rows &first = facts.rows[first_key], &last = facts.rows[first_key + kPartRows - 1];
  const bool all = last.begin <= first_row && first_row + kBlockQueries <= min_of(first.end, last.end);
  if (all && !facts.far) return;
  asm volatile("" ::: "memory");  // a branch: without it each step has the instructions, predicated
  hide_rows(s, facts, first_row);
  if (facts.far) bring_near(s, args, facts.block, place);
}

inline void make_logits(Scores& s, const ScoreRules<float>& rules, const Distances& away) {
#pragma unroll
  for (int j = 0; j < kQueryTiles; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& x = s[0][j][i];
      x *= rules.scale;
      if constexpr (kSoftcap) x = ScalarMath::tanh(x * rules.inverse_cap) * rules.cap;
      if constexpr (kAlibi) x -= away(j, i) * rules.slope;
    }
}

// fp16 has no numbers below 2^-24, as weights among thousands of keys are: there they are this much larger, in dV and in what
// dS^T is made of.
constexpr float kWeightUnit = kElement == Element::fp16 ? 32768.f : 1.f;

// Scores become P^T, in units.
inline void weigh_step(Scores& s, float c, u32 references) {
#pragma unroll
  for (int j = 0; j < kQueryTiles; j += 2) {
    const FourFacts reference(references, j);
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      float& x = s[0][j + m / 4][m % 4];
      const float own = reference(m / 4, m % 2);
      const float exponent = kNatural ? (x - own) * static_cast<float>(kLog2e) : __fmaf_rn(x, c, -own);
      x = exp2_approx(min_or_nan(exponent, 0.f)) * kWeightUnit;
    }
  }
}

// What rounding to 16 bits takes from P^T, of which dS^T is to be made: registers are too few for both. A byte of each weight, the
// eight bits behind those that are kept, a tile of 8 queries a word.
using Remainders = u32[kQueryTiles];
constexpr int kRestShift = kElement == Element::fp16 ? 3 : 0;  // to the second byte of an fp32 number
constexpr u32 kHalfRest = 0x8000u >> kRestShift;

inline void keep_remainders(Remainders& rest, const Scores& p) {
  const auto bits = [&](int j, int i) { return as_bits(p[0][j][i]) << kRestShift; };
#pragma unroll
  for (int j = 0; j < kQueryTiles; ++j) {
    const u32 low = pick_bytes(bits(j, 0), bits(j, 1), 0x0051);
    const u32 high = pick_bytes(bits(j, 2), bits(j, 3), 0x5100);
    rest[j] = pick_bytes(low, high, 0x7610) ^ 0x80808080u;
  }
}

// A weight to 2^-16 of itself (fp16: 2^-19). pair: it and its neighbour, rounded to nearest: up where the byte behind was 0x80 or
// more, which the exclusive or above made less. Of one weight in 2^17, a tie that went down, 2^-8 of it is lost. In fp16 one that
// is no normal number there keeps what it is.
inline float weight_of(u32 pair, u32 rest, int i) {
  const u32 byte = static_cast<u32>(4 + i);
  if constexpr (kElement == Element::bf16) {
    return as_float(pick_bytes(pair, rest, (i % 2 == 0 ? 0x1000u : 0x3200u) + byte * 0x11) - kHalfRest);
  } else {
    const u32 x = pick_bytes(pair, rest, (i % 2 == 0 ? 0x1000u : 0x3200u) + byte * 0x11);
    const u32 kept = as_bits(widen_fp16(static_cast<unsigned short>(x >> 16))), behind = (x & 0xffffu) >> kRestShift;
    return as_float(static_cast<u32>(max_of(static_cast<i32>(kept + behind - kHalfRest), 0)));
  }
}

// Weights that were rounded, again.
struct KeptWeights {
  const Operands& p;
  const Remainders& rest;
  float operator()(int tile, int i) const { return weight_of(p[tile / 2][tile % 2 * 2 + i / 2], rest[tile], i); }
};

// dP^T becomes the gradient of the logits, P^T (dP^T - delta). weights(tile of 8 queries, number of a lane's four).
template <int begin = 0, int end = kQueryTiles, class Weights>
inline void differentiate_step(Scores& g, const Weights& weights, u32 deltas) {
  constexpr float unit = 1 / kWeightUnit;
#pragma unroll
  for (int j = begin; j < end; j += 2) {
    const FourFacts delta(deltas, j);
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      float& x = g[0][j + m / 4][m % 4];
      const float own = delta(m / 4, m % 2), difference = unit == 1 ? x - own : __fmaf_rn(x, unit, -(own * unit));
      x = weights(j + m / 4, m % 4) * difference;
    }
  }
}

// The lane's part of dslope. g: of the logits.
template <int begin = 0, int end = kQueryTiles> inline float slope_of(const Scores& g, const Distances& away) {
  float slope = 0.f;
#pragma unroll
  for (int j = begin; j < end; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i) slope -= away(j, i) * g[0][j][i];
  return slope;
}

// From the gradient of the logits to that of scale * Q K^T. The capped score is found again in its weight: there is no register
// for each tanh.
template <int begin = 0, int end = kQueryTiles, class Weights>
inline void pass_softcap(Scores& g, const Weights& weights, u32 references, const ScoreRules<float>& rules,
                         const Distances& away) {
#pragma unroll
  for (int j = begin; j < end; j += 2) {
    const FourFacts reference(references, j);
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      const int tile = j + m / 4, i = m % 4;
      const float exponent = log2_approx(weights(tile, i) * (1 / kWeightUnit));
      float capped = __fmaf_rn(exponent, static_cast<float>(kLn2), reference(m / 4, m % 2));
      if constexpr (kAlibi) capped += away(tile, i) * rules.slope;
      const float tangent = fmaxf(fminf(capped * rules.inverse_cap, 1.f), -1.f);  // of a weight of 0: its gradient is 0
      g[0][tile][i] *= softcap_derivative(tangent);
    }
  }
}

}  // namespace narrows
