// From dot products to logits, in the accumulators of a warp: the score rules, hidden keys, dropout.
#pragma once
#include "kernels/query_block.cuh"

namespace narrows {

constexpr int kRows = 2 * kRowTiles;  // of scores that a lane holds a quarter of
constexpr float kHidden = -kInfinity<float>;

// Where a lane's accumulators are.
struct LanePlace {
  i32 lane = static_cast<i32>(threadIdx.x) % kWarp;
  i32 first_row = static_cast<i32>(threadIdx.x) / kWarp * kWarpRows;  // of the warp, within the block

  i32 row(int r) const { return first_row + r / 2 * 16 + r % 2 * 8 + lane / 4; }  // r in [0, kRows)
  i32 column(int j, int e) const { return 8 * j + lane % 4 * 2 + e; }
};

// What the call adds to one head's scores.
struct HeadRules {
  ScoreRules<float> scores;
  const char *bias, *mask;  // of this sequence and head

  HeadRules(const ForwardArgs& args, const QueryBlock& block) : scores(args.rules) {
    const i64 b = block.sequence, h = block.head;
    if constexpr (kAlibi)
      scores.slope =
          load_element(args.alibi_slopes.data + b * args.alibi_slopes.strides[0] + h * args.alibi_slopes.strides[1],
                       args.alibi_slopes.element);
    bias = args.bias.data + b * args.bias.strides[0] + h * args.bias.strides[1];
    mask = args.mask.data + b * args.mask.strides[0] + h * args.mask.strides[1];
  }
};

inline float load_bias(const char* at) { return load_element(at, kBiasElement); }

// Elements of a bias or a mask are read for rows and keys that exist; what other columns get is hidden later.
inline void make_logits(Scores& s, const ForwardArgs& args, const QueryBlock& block, const HeadRules& rules,
                        i32 first_key) {
  const LanePlace place;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const i32 i = block.first_row + place.row(r);
    const float position = static_cast<float>(i + block.shift - first_key);
    const char* const row = rules.bias + i64{min_of(i, block.queries - 1)} * args.bias.strides[2];
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const i32 column = place.column(j, e);
        float& x = s[r / 2][j][r % 2 * 2 + e];
        const float away = kAlibi ? fabsf(position - static_cast<float>(column)) : 0.f;
        const float bias =
            kBias ? load_bias(row + i64{min_of(first_key + column, block.keys - 1)} * args.bias.strides[3]) : 0.f;
        if constexpr (kSoftcap) {
          x = logit<ScalarMath>(x, rules.scores, away, bias);
        } else {
          x = x * rules.scores.scale;
          if constexpr (kAlibi) x -= away * rules.scores.slope;
          if constexpr (kBias) x += bias;
        }
      }
  }
}

inline void hide_masked(Scores& s, const ForwardArgs& args, const QueryBlock& block, const HeadRules& rules,
                        i32 first_key) {
  const LanePlace place;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const char* const row =
        rules.mask + i64{min_of(block.first_row + place.row(r), block.queries - 1)} * args.mask.strides[2];
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (row[i64{min_of(first_key + place.column(j, e), block.keys - 1)} * args.mask.strides[3]] == 0)
          s[r / 2][j][r % 2 * 2 + e] = kHidden;
  }
}

// Keys that a row does not see. rows: what look() left.
inline void hide_unseen(Scores& s, const Keys* rows, i32 first_key) {
  const LanePlace place;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const Keys seen = rows[place.row(r)];
    const u32 before = static_cast<u32>(first_key - seen.begin), count = static_cast<u32>(seen.end - seen.begin);
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (before + static_cast<u32>(place.column(j, e)) >= count) s[r / 2][j][r % 2 * 2 + e] = kHidden;
  }
}

inline DropoutRule dropout_rule(const ForwardArgs& args) {
  DropoutRule rule = args.dropout;
  rule.seed = args.seed.place ? static_cast<u64>(*args.seed.place) : args.seed.value;
  rule.offset = static_cast<u32>(args.offset.place ? static_cast<u64>(*args.offset.place) : args.offset.value);
  return rule;
}

// Drops weights. A Philox block decides on 8 keys of a row, which a quad holds: each of its lanes draws a quarter of the blocks.
inline void drop(Scores& p, const DropoutRule& rule, const QueryBlock& block, i32 first_key) {
  const LanePlace place;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    u32 bits = 0;
#pragma unroll
    for (int n = 0; n < ceil_div(kKeyTiles, 4); ++n)
      bits |= keep_bits8(rule, block.sequence, block.head, block.first_row + place.row(r),
                         first_key + 8 * (4 * n + place.lane % 4))
              << 8 * n;
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
      const u32 keep = __shfl_sync(~0u, bits, j % 4, 4) >> (8 * (j / 4) + place.lane % 4 * 2);
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if ((keep >> e & 1u) == 0) p[r / 2][j][r % 2 * 2 + e] = 0.f;
    }
  }
}

}  // namespace narrows
