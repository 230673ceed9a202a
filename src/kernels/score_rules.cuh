// From dot products to logits, in the accumulators of a warp: the score rules, hidden keys, dropout.
#pragma once
#include "kernels/head_rules.cuh"
#include "kernels/score_tile.cuh"

namespace narrows {

// bias: the tile's, in shared memory.
inline void make_logits(Scores& s, const QueryBlock& block, const HeadRules& rules, u32 bias, i32 first_key) {
  const LanePlace place;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float position = static_cast<float>(block.first_row + place.row(r) + block.shift - first_key);
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
      float added[2] = {};
      if constexpr (kBias) read_bias(added, bias, place.row(r), place.column(j, 0));
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[r / 2][j][r % 2 * 2 + e];
        const float away = kAlibi ? fabsf(position - static_cast<float>(place.column(j, e))) : 0.f;
        if constexpr (kSoftcap) {
          x = logit<ScalarMath>(x, rules.scores, away, added[e]);
        } else {
          x = x * rules.scores.scale;
          if constexpr (kAlibi) x -= away * rules.scores.slope;
          if constexpr (kBias) x += added[e];
        }
      }
    }
  }
}

// mask: the tile's, in shared memory.
inline void hide_masked(Scores& s, u32 mask) {
  const LanePlace place;
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
      const u32 allowed = read_mask(mask, place.row(r), place.column(j, 0));
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if ((allowed >> 8 * e & 0xffu) == 0) s[r / 2][j][r % 2 * 2 + e] = kHidden;
    }
}

// Keys that a lane's row r does not see.
inline void hide_unseen(Scores& s, int r, const Keys& seen, i32 first_key) {
  const LanePlace place;
  const u32 before = static_cast<u32>(first_key - seen.begin), count = static_cast<u32>(seen.end - seen.begin);
#pragma unroll
  for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (before + static_cast<u32>(place.column(j, e)) >= count) s[r / 2][j][r % 2 * 2 + e] = kHidden;
}

// rows: of the block, what each sees.
inline void hide_unseen(Scores& s, const Keys* rows, i32 first_key) {
  const LanePlace place;
#pragma unroll
  for (int r = 0; r < kRows; ++r) hide_unseen(s, r, rows[place.row(r)], first_key);
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
