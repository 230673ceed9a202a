// From dot products to logits, in the accumulators of a warp: the score rules, hidden keys, dropout.
#pragma once
#include "kernels/query_block.cuh"

namespace narrows {

constexpr int kRows = 2 * kRowTiles;  // of scores that a lane holds a quarter of
constexpr float kHidden = -kInfinity<float>;

// Where a lane's accumulators are.
struct LanePlace {
  i32 lane = static_cast<i32>(threadIdx.x % kWarp);
  i32 first_row = static_cast<i32>(threadIdx.x / kWarp) * kWarpRows;  // of the warp, within the block

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

// One row's elements of a bias or a mask at a lane's columns: x[2 j + e]. Rows and keys that do not exist are not read; what their
// columns get instead is hidden later.
struct ScoreRow {
  const char* first;  // of the row: key 0's
  i64 step;           // bytes from key to key

  ScoreRow(const char* head, const TensorArg& tensor, const QueryBlock& block, i32 row)
      : first(head + i64{min_of(block.first_row + row, block.queries - 1)} * tensor.strides[2]),
        step(tensor.strides[3]) {}
};

// Whether all lanes may read two elements at once, without a look at each key: keys side by side, pairs aligned, and a tile of
// keys that exist.
inline bool reads_pairs(const TensorArg& tensor, const char* head, int bytes, i32 first_key, i32 keys) {
  const u64 misaligned = reinterpret_cast<u64>(head) | static_cast<u64>(tensor.strides[2]);
  return tensor.strides[3] == bytes && misaligned % static_cast<u64>(2 * bytes) == 0 && first_key + kBlockKeys <= keys;
}

inline void load_bias(float (&x)[2 * kKeyTiles], const ScoreRow& row, bool pairs, i32 first_key, i32 keys) {
  const LanePlace place;
  constexpr int bytes = element_bytes(kBiasElement);
#pragma unroll
  for (int j = 0; j < kKeyTiles; ++j) {
    const i32 key = first_key + place.column(j, 0);
    if (pairs) {
      load_pair(row.first + i64{key} * bytes, kBiasElement, x[2 * j], x[2 * j + 1]);
    } else {
      x[2 * j] = load_element(row.first + i64{min_of(key, keys - 1)} * row.step, kBiasElement);
      x[2 * j + 1] = load_element(row.first + i64{min_of(key + 1, keys - 1)} * row.step, kBiasElement);
    }
  }
}

inline void make_logits(Scores& s, const ForwardArgs& args, const QueryBlock& block, const HeadRules& rules,
                        i32 first_key) {
  const LanePlace place;
  const bool pairs = kBias && reads_pairs(args.bias, rules.bias, element_bytes(kBiasElement), first_key, block.keys);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float position = static_cast<float>(block.first_row + place.row(r) + block.shift - first_key);
    float bias[2 * kKeyTiles] = {};
    if constexpr (kBias) load_bias(bias, {rules.bias, args.bias, block, place.row(r)}, pairs, first_key, block.keys);
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = s[r / 2][j][r % 2 * 2 + e];
        const float away = kAlibi ? fabsf(position - static_cast<float>(place.column(j, e))) : 0.f;
        if constexpr (kSoftcap) {
          x = logit<ScalarMath>(x, rules.scores, away, bias[2 * j + e]);
        } else {
          x = x * rules.scores.scale;
          if constexpr (kAlibi) x -= away * rules.scores.slope;
          if constexpr (kBias) x += bias[2 * j + e];
        }
      }
  }
}

inline void hide_masked(Scores& s, const ForwardArgs& args, const QueryBlock& block, const HeadRules& rules,
                        i32 first_key) {
  const LanePlace place;
  const bool pairs = reads_pairs(args.mask, rules.mask, 1, first_key, block.keys);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const ScoreRow row(rules.mask, args.mask, block, place.row(r));
    u32 allowed[kKeyTiles];  // two bytes each
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
      const i32 key = first_key + place.column(j, 0);
      if (pairs)
        allowed[j] = *reinterpret_cast<const unsigned short*>(row.first + key);
      else
        allowed[j] =
            static_cast<u32>(static_cast<unsigned char>(row.first[i64{min_of(key, block.keys - 1)} * row.step])) |
            static_cast<u32>(static_cast<unsigned char>(row.first[i64{min_of(key + 1, block.keys - 1)} * row.step]))
                << 8;
    }
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if ((allowed[j] >> 8 * e & 0xffu) == 0) s[r / 2][j][r % 2 * 2 + e] = kHidden;
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
