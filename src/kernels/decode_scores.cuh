// From dot products to logits in a decode kernel: a lane's quarter of a tile's keys, of one or two packed rows.
//
// What includes this has a kernel's Scores, kRows of them in a lane, kKeyTiles, and DecodeLane.
#pragma once
#include "kernels/decode_facts.cuh"

namespace narrows {

// What the rules need of a lane's packed rows.
struct RuledRows {
  PackedRow rows[kRows];
  ScoreRules<float> scores[kRows];

  RuledRows(const Block& block) {
    const DecodeLane at;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      rows[r] = packed_row(block.args, block.facts, min_of(at.row(r), block.facts.packed_rows - 1));
      scores[r] = HeadRules(block.args, block.facts.sequence.sequence, rows[r].head).scores;
    }
  }
};

// body(r, t, e, key) for each of the lane's scores.
template <class Body> inline void each_score(i32 tile, const Body& body) {
  const DecodeLane at;
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
      for (int e = 0; e < 2; ++e) body(r, t, e, tile * kTileKeys + 8 * t + 2 * at.c + e);
}

// The elements of a bias and of a mask for a tile, asked for before the products. What no row sees is not read.
struct ScoreTile {
  float bias[kRows][kKeyTiles][2];
  bool masked[kRows][kKeyTiles][2];

  ScoreTile(const Block& block, const RuledRows& ruled, i32 tile) {
    const DecodeLane at;
    each_score(tile, [&](int r, int t, int e, i32 key) {
      const Keys seen = block.facts.seen[at.row(r)];
      const bool exists = seen.begin <= key && key < seen.end;
      const auto element = [&](const TensorArg& tensor) {
        return tensor.data + block.facts.sequence.sequence * tensor.strides[0] +
               ruled.rows[r].head * tensor.strides[1] + ruled.rows[r].query * tensor.strides[2] +
               key * tensor.strides[3];
      };
      if constexpr (kBias) bias[r][t][e] = exists ? load_element(element(block.args.bias), kBiasElement) : 0.f;
      if constexpr (kMask) masked[r][t][e] = exists && *element(block.args.mask) == 0;
    });
  }
};

inline void make_logits(Scores& s, const Block& block, const RuledRows& ruled, const ScoreTile& given, i32 tile) {
  each_score(tile, [&](int r, int t, int e, i32 key) {
    float& x = s[0][t][2 * r + e];
    const i64 position = ruled.rows[r].query + block.facts.sequence.shift;
    const float away = kAlibi ? fabsf(static_cast<float>(position - key)) : 0.f;
    float added = 0.f;
    if constexpr (kBias) added = given.bias[r][t][e];
    if constexpr (kSoftcap) {
      x = logit<ScalarMath>(x, ruled.scores[r], away, added);
    } else {
      x = x * ruled.scores[r].scale;
      if constexpr (kAlibi) x -= away * ruled.scores[r].slope;
      if constexpr (kBias) x += added;
    }
  });
}

inline void hide_masked(Scores& s, const ScoreTile& given, i32 tile) {
  each_score(tile, [&](int r, int t, int e, i32) {
    if (given.masked[r][t][e]) s[0][t][2 * r + e] = kHidden;
  });
}

// Keys that a row does not see.
inline void hide_unseen(Scores& s, const Facts& facts, i32 tile) {
  const DecodeLane at;
  each_score(tile, [&](int r, int t, int e, i32 key) {
    const Keys seen = facts.seen[at.row(r)];
    if (static_cast<u32>(key - seen.begin) >= static_cast<u32>(seen.end - seen.begin)) s[0][t][2 * r + e] = kHidden;
  });
}

inline void drop(Scores& p, const DropoutRule& rule, const Block& block, const RuledRows& ruled, i32 tile) {
  const DecodeLane at;
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
      const u32 keep = keep_bits8(rule, block.facts.sequence.sequence, ruled.rows[r].head, ruled.rows[r].query,
                                  tile * kTileKeys + 8 * t) >>
                       2 * at.c;
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if ((keep >> e & 1u) == 0) p[0][t][2 * r + e] = 0.f;
    }
}

}  // namespace narrows
