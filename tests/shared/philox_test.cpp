#include "shared/philox.h"

#include <gtest/gtest.h>

#include <cmath>

namespace narrows {
namespace {

constexpr bool equal(const PhiloxBlock<u32>& a, const PhiloxBlock<u32>& b) {
  for (int i = 0; i < 4; ++i) {
    if (a.words[i] != b.words[i]) return false;
  }
  return true;
}

// The published known answers: zeros, ones, digits of pi (Random123's kat_vectors, philox4x32 with 10 rounds).
static_assert(equal(philox4x32_10<PhiloxMath>(PhiloxBlock<u32>{{0, 0, 0, 0}}, 0, 0),
                    {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}));
static_assert(equal(philox4x32_10<PhiloxMath>(PhiloxBlock<u32>{{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u),
                    {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}));
static_assert(equal(philox4x32_10<PhiloxMath>(PhiloxBlock<u32>{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
                                              0xa4093822, 0x299f31d0),
                    {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}));

static_assert(keep_threshold(0) == 65536 && keep_threshold(0.5) == 32768 && keep_threshold(0.1) == 58982);
static_assert(keep_threshold(1 - 1.0 / 65536) == 1 && keep_threshold(1 - 0.49 / 65536) == 0);
static_assert(keep_factor<float>({.threshold = 65536}) == 1.f && keep_factor<double>({.threshold = 32768}) == 2.0);

// The contract's sentence, written once more: counter (j / 8, i, b H + h, offset), word (j % 8) / 2, low half first.
bool kept_by_contract(const DropoutRule& rule, i64 b, i64 h, i64 i, i64 j) {
  const PhiloxBlock<u32> random =
      philox4x32_10<PhiloxMath>(PhiloxBlock<u32>{{static_cast<u32>(j / 8), static_cast<u32>(i),
                                                  static_cast<u32>(b * rule.heads + h), rule.offset}},
                                static_cast<u32>(rule.seed & 0xffffffffu), static_cast<u32>(rule.seed >> 32));
  const u32 word = random.words[j % 8 / 2];
  return (j % 2 == 0 ? word & 0xffffu : word >> 16) < rule.threshold;
}

const DropoutRule kRule{.seed = 0x123456789abcdef0, .offset = 7, .threshold = keep_threshold(0.3), .heads = 12};

TEST(Dropout, each_element_follows_the_contract) {
  int kept_count = 0;
  for (i64 b = 0; b < 3; ++b) {
    for (i64 h = 0; h < 12; h += 5) {
      for (i64 i = 0; i < 20; ++i) {
        for (i64 j = 0; j < 50; ++j) {
          ASSERT_EQ(kept(kRule, b, h, i, j), kept_by_contract(kRule, b, h, i, j)) << b << h << i << ' ' << j;
          kept_count += kept(kRule, b, h, i, j) ? 1 : 0;
        }
      }
    }
  }
  EXPECT_NEAR(kept_count / (9 * 20 * 50.0), 0.7, 0.02);
}

TEST(Dropout, the_place_in_the_whole_model_decides) {
  DropoutRule shard = kRule;
  shard.origin_batch = 2;
  shard.origin_head = 4;
  shard.origin_row = (i64{1} << 31) + 5;
  for (const i64 origin_key : {i64{0}, i64{3}, i64{8}, i64{21}, (i64{1} << 34) - 5}) {
    shard.origin_key = origin_key;
    for (i64 i = 0; i < 6; ++i) {
      for (i64 j = 0; j < 40; ++j) {
        const bool expected = kept_by_contract(kRule, 1 + 2, 3 + 4, i + shard.origin_row, j + origin_key);
        ASSERT_EQ(kept(shard, 1, 3, i, j), expected) << "origin " << origin_key << " row " << i << " key " << j;
      }
    }
  }
}

TEST(Dropout, eight_decisions_are_those_of_the_eight_elements) {
  DropoutRule rule = kRule;
  for (rule.origin_key = 0; rule.origin_key < 9; ++rule.origin_key) {
    for (i64 j = 0; j < 40; ++j) {
      const u32 bits = keep_bits8(rule, 1, 2, 3, j);
      ASSERT_EQ(bits >> 8, 0u);
      for (i64 k = 0; k < 8; ++k) {
        ASSERT_EQ((bits >> k & 1u) != 0, kept(rule, 1, 2, 3, j + k)) << rule.origin_key << ' ' << j << ' ' << k;
      }
    }
  }
}

TEST(Dropout, every_word_of_counter_and_key_matters) {
  const DropoutRule base = kRule;
  const auto differing = [&](const DropoutRule& other, i64 b, i64 h, i64 i, i64 j) {
    int count = 0;
    for (i64 k = 0; k < 512; ++k) count += kept(base, 0, 0, 0, k) != kept(other, b, h, i, j + k) ? 1 : 0;
    return count;
  };
  DropoutRule other = base;
  EXPECT_EQ(differing(base, 0, 0, 0, 0), 0);
  EXPECT_GT(differing(base, 1, 0, 0, 0), 100);
  EXPECT_GT(differing(base, 0, 1, 0, 0), 100);
  EXPECT_GT(differing(base, 0, 0, 1, 0), 100);
  EXPECT_GT(differing(base, 0, 0, 0, 8), 100);
  EXPECT_EQ(differing(base, 1, -12, 0, 0), 0) << "batch 1, head -12 is batch 0, head 0";
  other.seed ^= 1;
  EXPECT_GT(differing(other, 0, 0, 0, 0), 100);
  other.seed = base.seed ^ u64 { 1 } << 63;
  EXPECT_GT(differing(other, 0, 0, 0, 0), 100);
  other.seed = base.seed;
  other.offset ^= 1;
  EXPECT_GT(differing(other, 0, 0, 0, 0), 100);
}

TEST(Dropout, thresholds_at_the_ends) {
  DropoutRule rule = kRule;
  rule.threshold = 65536;
  for (i64 j = 0; j < 4096; j += 8) ASSERT_EQ(keep_bits8(rule, 0, 0, 0, j), 0xffu);
  rule.threshold = 0;
  for (i64 j = 0; j < 4096; j += 8) ASSERT_EQ(keep_bits8(rule, 0, 0, 0, j), 0u);
  for (i64 j = 0; j < 16; ++j) {
    const PhiloxBlock<u32> random =
        philox4x32_10<PhiloxMath>(PhiloxBlock<u32>{{static_cast<u32>(j / 8), 0, 0, 7}}, 0x9abcdef0, 0x12345678);
    const u32 half = random.words[j % 8 / 2] >> (j % 2 * 16) & 0xffffu;
    rule.threshold = half;
    EXPECT_FALSE(kept(rule, 0, 0, 0, j));
    rule.threshold = half + 1;
    EXPECT_TRUE(kept(rule, 0, 0, 0, j));
  }
  // Frequencies within five standard deviations.
  for (const double p : {0.01, 0.1, 0.5, 0.9}) {
    rule.threshold = keep_threshold(p);
    const int n = 1 << 17;
    int count = 0;
    for (i64 j = 0; j < n; j += 8) count += __builtin_popcount(keep_bits8(rule, 0, 0, 5, j));
    EXPECT_NEAR(count, n * (1 - p), 5 * std::sqrt(n * p * (1 - p))) << p;
  }
}

}  // namespace
}  // namespace narrows
