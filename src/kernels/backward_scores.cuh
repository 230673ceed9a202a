// From the dot products of a step to P^T and dS^T, in the accumulators of a warp: the score rules, hidden keys, dropout.
#pragma once
#include "kernels/head_rules.cuh"
#include "kernels/key_block.cuh"

namespace narrows {

// The elements of a bias or a mask that belong to a lane's scores, read where they lie.
struct ScoreElements {
  const char* first;  // of the step's first query and the block's first key
  i64 row_stride, key_stride;
  i32 rows, keys;  // that exist

  ScoreElements(const TensorArg& tensor, const KeyBlock& block, i32 head, i32 first_row)
      : first(tensor.data + block.sequence * tensor.strides[0] + head * tensor.strides[1] +
              first_row * tensor.strides[2] + block.first * tensor.strides[3]),
        row_stride(tensor.strides[2]),
        key_stride(tensor.strides[3]),
        rows(block.queries - first_row),
        keys(block.keys - block.first) {}
  bool exists(i32 query, i32 key) const { return query < rows && key < keys; }
  const char* at(i32 query, i32 key) const { return first + query * row_stride + key * key_stride; }
};

// tanh(scale * s / cap) of each score, for the way back.
using Tangents = float[kSoftcap ? kRowTiles : 1][kQueryTiles][4];

// Calls body(r, j, e, score) for each score of a lane: key r, query (j, e).
template <class Body> inline void each_score(Scores& s, const Body& body) {
#pragma unroll
  for (int j = 0; j < kQueryTiles; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int r = 0; r < kRows; ++r) body(r, j, e, s[r / 2][j][r % 2 * 2 + e]);
}

// |p - j| of one score.
inline float away(const KeyBlock& block, i32 first_row, i32 query, i32 key) {
  return fabsf(static_cast<float>(first_row + query + block.shift - block.first) - static_cast<float>(key));
}

inline void make_logits(Scores& s, Tangents& tangents, const BackwardArgs& args, const KeyBlock& block,
                        const ScoreRules<float>& rules, i32 head, i32 first_row) {
  const LanePlace place;
  const ScoreElements bias(args.bias, block, head, first_row);
  each_score(s, [&](int r, int j, int e, float& x) {
    const i32 query = place.query(j, e), key = place.key(r);
    x *= rules.scale;
    if constexpr (kSoftcap) {
      float& tangent = tangents[r / 2][j][r % 2 * 2 + e];
      tangent = ScalarMath::tanh(x * rules.inverse_cap);
      x = tangent * rules.cap;
    }
    if constexpr (kAlibi) x -= away(block, first_row, query, key) * rules.slope;
    if constexpr (kBias)
      if (bias.exists(query, key)) x += load_element(bias.at(query, key), kBiasElement);
  });
}

// Two neighbouring queries' facts, as they lie in shared memory.
struct FactsOfTwo {
  float reference[2], delta[2];
  FactsOfTwo(u32 rows, i32 query) {
    u32 words[4];
    load_shared128(rows + static_cast<u32>(query) * u32{sizeof(RowFacts)}, words[0], words[1], words[2], words[3]);
#pragma unroll
    for (int e = 0; e < 2; ++e) reference[e] = as_float(words[2 * e]), delta[e] = as_float(words[2 * e + 1]);
  }
};

// Scores of rows whose LSE is far out become differences to it, in the scores' units: their reference is 0.
inline void bring_near(Scores& s, const BackwardArgs& args, const KeyBlock& block, i32 head, i32 first_row) {
  const LanePlace place;
  const char* const lse = args.lse.data + block.sequence * args.lse.strides[0] + head * args.lse.strides[1] +
                          (block.first_query + first_row) * args.lse.strides[2];
  each_score(s, [&](int, int j, int e, float& x) {
    const i32 query = place.query(j, e);
    if (first_row + query >= block.queries) return;
    const float row = *reinterpret_cast<const float*>(lse + query * args.lse.strides[2]);
    if (is_far(row)) x = (ScalarMath::multiply(x, args.units.scale) - row) / args.units.scale;
  });
}

// Scores become P^T. rows: the queries' facts.
inline void weigh(Scores& s, const BackwardArgs& args, u32 rows) {
  const LanePlace place;
#pragma unroll
  for (int j = 0; j < kQueryTiles; ++j) {
    const FactsOfTwo facts(rows, place.query(j, 0));
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[r / 2][j][r % 2 * 2 + e];
        const float exponent = kNatural ? (x - facts.reference[e]) * static_cast<float>(kLog2e)
                                        : __fmaf_rn(x, args.units.c, -facts.reference[e]);
        x = exp2_approx(min_or_nan(exponent, 0.f));
      }
  }
}

// Keys that a row does not see. seen: what each query sees.
inline void hide_unseen(Scores& s, u32 seen, i32 first_key) {
  const LanePlace place;
#pragma unroll
  for (int j = 0; j < kQueryTiles; ++j) {
    u32 words[4];  // begin and end of two queries
    load_shared128(seen + static_cast<u32>(place.query(j, 0)) * u32{sizeof(Keys)}, words[0], words[1], words[2],
                   words[3]);
#pragma unroll
    for (int e = 0; e < 2; ++e)
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const u32 key = static_cast<u32>(first_key + place.key(r));
        if (key - words[2 * e] >= words[2 * e + 1] - words[2 * e]) s[r / 2][j][r % 2 * 2 + e] = kHidden;
      }
  }
}

inline void hide_masked(Scores& s, const BackwardArgs& args, const KeyBlock& block, i32 head, i32 first_row) {
  const LanePlace place;
  const ScoreElements mask(args.mask, block, head, first_row);
  each_score(s, [&](int r, int j, int e, float& x) {
    const i32 query = place.query(j, e), key = place.key(r);
    if (!mask.exists(query, key) || *mask.at(query, key) == 0) x = kHidden;
  });
}

// Which scores of a lane dropout keeps. A Philox block decides on 8 keys of a query, which 8 lanes hold: each of them draws an
// eighth of the blocks.
struct Kept {
  static constexpr int draws = 2 * kQueryTiles * kRows, words = ceil_div(draws, 32);
  u32 bits[words] = {};

  static constexpr int place_of(int r, int j, int e) { return (j * 2 + e) * kRows + r; }
  bool operator()(int r, int j, int e) const {
    return (bits[place_of(r, j, e) / 32] >> place_of(r, j, e) % 32 & 1u) != 0;
  }

  Kept(const DropoutRule& rule, i32 sequence, i32 head, i32 first_row, i32 first_key) {
    const LanePlace place;
    u32 own[words] = {};
#pragma unroll
    for (int n = 0; n < draws / 8; ++n) {
      const int draw = 8 * n + place.lane / 4, r = draw % kRows, e = draw / kRows % 2, j = draw / kRows / 2;
      const i32 row = first_row + place.query(j, e), key = first_key + place.first_key() + r / 2 * 16 + r % 2 * 8;
      own[n / 4] |= keep_bits8(rule, sequence, head, row, key) << n % 4 * 8;
    }
#pragma unroll
    for (int n = 0; n < draws / 8; ++n)
#pragma unroll
      for (int from = 0; from < 8; ++from) {
        const u32 drawn = __shfl_sync(~0u, own[n / 4], from * 4 + place.lane % 4) >> (n % 4 * 8 + place.lane / 4);
        bits[(8 * n + from) / 32] |= (drawn & 1u) << (8 * n + from) % 32;
      }
  }
};

// dP^T becomes the gradient of the logits.
inline void differentiate(Scores& g, const Scores& p, u32 rows) {
  const LanePlace place;
#pragma unroll
  for (int j = 0; j < kQueryTiles; ++j) {
    const FactsOfTwo facts(rows, place.query(j, 0));
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = g[r / 2][j][r % 2 * 2 + e];
        x = p[r / 2][j][r % 2 * 2 + e] * (x - facts.delta[e]);
      }
  }
}

// The lane's part of dslope. g: of the logits.
inline float slope_of(Scores& g, const KeyBlock& block, i32 first_row) {
  const LanePlace place;
  float slope = 0.f;
  each_score(
      g, [&](int r, int j, int e, float& x) { slope -= away(block, first_row, place.query(j, e), place.key(r)) * x; });
  return slope;
}

// From the gradient of the logits to that of scale * Q K^T.
inline void pass_softcap(Scores& g, const Tangents& tangents) {
  each_score(g, [&](int r, int j, int e, float& x) { x *= softcap_derivative(tangents[r / 2][j][r % 2 * 2 + e]); });
}

// factor: of what is kept.
inline void drop(Scores& x, const Kept& kept, float factor) {
  each_score(x, [&](int r, int j, int e, float& value) { value = kept(r, j, e) ? value * factor : 0.f; });
}

// A lane's scores to a tile in shared memory, where a row is a key.
inline void store_scores(u32 tile, const Scores& s) {
  const LanePlace place;
  const int byte = place.lane % 4 * 2 * kElementBytes;
  const UnitAddress<kScoreTile> to(tile + static_cast<u32>(byte % kUnitBytes), place.key(0),
                                   place.first_query() * kElementBytes / kUnitBytes + byte / kUnitBytes);
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int j = 0; j < kQueryTiles; ++j)
      store_pair(to.at(8 * j * kElementBytes / kUnitBytes, 8 * r), s[r / 2][j][r % 2 * 2], s[r / 2][j][r % 2 * 2 + 1]);
}

}  // namespace narrows
