// Which probabilities dropout keeps. Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3,
// SC 2011) is a function of a counter and a key, so a decision depends on where its element stands in the whole model and
// on nothing else: not on the backend, the pass, the tiling, a split or a rank.
#pragma once
#include "shared/params.h"

namespace narrows {

// Word is u32, or a vector whose lanes are blocks: u64 lanes that hold 32 bits each.
template <class Word> struct PhiloxBlock { Word words[4]; };

template <class Word> struct PhiloxProduct { Word high, low; };

struct PhiloxMath {
  static constexpr PhiloxProduct<u32> product(u32 factor, u32 word) {
    const u64 both = u64{factor} * word;
    return {static_cast<u32>(both >> 32), static_cast<u32>(both)};
  }
};

template <class Math, class Word>
constexpr PhiloxBlock<Word> philox4x32_10(PhiloxBlock<Word> counter, u32 key0, u32 key1) {
  for (int round = 0; round < 10; ++round) {
    const PhiloxProduct<Word> a = Math::product(0xD2511F53u, counter.words[0]);
    const PhiloxProduct<Word> b = Math::product(0xCD9E8D57u, counter.words[2]);
    counter = {{b.high ^ counter.words[1] ^ key0, b.low, a.high ^ counter.words[3] ^ key1, a.low}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// An element is kept when its 16 random bits are below this. 65536 keeps all; 0, which callers refuse, none.
constexpr u32 keep_threshold(double p) { return static_cast<u32>(65536 * (1 - p) + 0.5); }

struct DropoutRule {
  u64 seed = 0;
  u32 offset = 0;
  u32 threshold = 65536;
  // Where element (0, 0, 0, 0) of this call stands in the whole model, and the query heads of that model.
  i64 origin_batch = 0;
  i64 origin_head = 0;
  i64 origin_row = 0;
  i64 origin_key = 0;
  i64 heads = 1;
};

// What a kept probability is multiplied by.
template <class T> constexpr T keep_factor(const DropoutRule& rule) { return static_cast<T>(65536.0 / rule.threshold); }

// Decisions for global keys 8 group .. 8 group + 7, key 8 group in bit 0: word (j % 8) / 2, low half first. Batch, head and
// row count within the call. What does not fit a 32-bit counter word enters it modulo 2^32; `group` comes so reduced.
template <class Math, class Word>
constexpr Word keep_groups(const DropoutRule& rule, i64 batch, i64 head, i64 row, Word group) {
  const u32 global_batch = static_cast<u32>(batch) + static_cast<u32>(rule.origin_batch);
  const u32 global_head = static_cast<u32>(head) + static_cast<u32>(rule.origin_head);
  const u32 global_row = static_cast<u32>(row) + static_cast<u32>(rule.origin_row);
  // Both halves are compared as upper halves; a threshold of 2^16 is none of 32 bits.
  const Word none = group ^ group, all = none + 0xFFFFFFFFu, threshold = none + (rule.threshold << 16);
  const PhiloxBlock<Word> counter{{group, none + global_row,
                                   none + (global_batch * static_cast<u32>(rule.heads) + global_head),
                                   none + rule.offset}};
  const PhiloxBlock<Word> random =
      philox4x32_10<Math>(counter, static_cast<u32>(rule.seed), static_cast<u32>(rule.seed >> 32));
  Word bits = none + (rule.threshold > 0xFFFFu ? 0xFFu : 0u);
  for (int word = 0; word < 4; ++word) {
    const Word low = (random.words[word] << 16 & all) < threshold ? none + (1u << 2 * word) : none;
    const Word high = random.words[word] < threshold ? none + (2u << 2 * word) : none;
    bits |= low | high;
  }
  return bits;
}

constexpr u32 keep_group(const DropoutRule& rule, i64 batch, i64 head, i64 row, u64 group) {
  return keep_groups<PhiloxMath>(rule, batch, head, row, static_cast<u32>(group));
}

constexpr u64 global_key(const DropoutRule& rule, i64 key) {
  return static_cast<u64>(key) + static_cast<u64>(rule.origin_key);
}

// Decisions for the call's keys key .. key + 7, key in bit 0. One Philox block where the global key is a multiple of 8.
constexpr u32 keep_bits8(const DropoutRule& rule, i64 batch, i64 head, i64 row, i64 key) {
  const u64 first = global_key(rule, key);
  const int skip = static_cast<int>(first % 8);
  const u32 bits = keep_group(rule, batch, head, row, first / 8);
  if (skip == 0) return bits;
  return (bits >> skip | keep_group(rule, batch, head, row, first / 8 + 1) << (8 - skip)) & 0xFFu;
}

// One element. Costs as much as eight.
constexpr bool kept(const DropoutRule& rule, i64 batch, i64 head, i64 row, i64 key) {
  const u64 global = global_key(rule, key);
  return (keep_group(rule, batch, head, row, global / 8) >> (global % 8) & 1u) != 0;
}

}  // namespace narrows
