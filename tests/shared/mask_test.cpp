#include "shared/mask.h"

#include <gtest/gtest.h>

#include <array>
#include <random>
#include <string>
#include <vector>

namespace narrows {
namespace {

// E01: causal is bottom-right, row i sees j <= i + sk - sq.
constexpr Mask kCausal = make_mask(-1, -1, true, 0);
static_assert(visible_keys(kCausal, 0 + 5 - 2, 5).end == 4 && visible_keys(kCausal, 1 + 5 - 2, 5).end == 5);
static_assert(visible_keys(kCausal, 2 + 2 - 5, 2).end == 0 && visible_keys(kCausal, 3 + 2 - 5, 2).end == 1);
static_assert(key_range(kCausal, {0, 3}, 2 - 5, 2).end == 0 && visible_pairs(kCausal, 5, 2, 2 - 5) == 3);
static_assert(visible_pairs(kCausal, 2, 5, 5 - 2) == 9 && visible_pairs(kCausal, 2, 5, 0) == 3);

// E04: bounds are inclusive, so W keys are left = W - 1. E11: left 128 of 256 keys leaves 127..255 for the last row.
static_assert(length(visible_keys(make_mask(2047, 0, false, 0), 4095, 4096)) == 2048);
static_assert(visible_keys(make_mask(128, -1, true, 0), 255, 256).begin == 127);

// E08: only -1 is unlimited; another negative side, refused elsewhere, is not taken for it.
static_assert(make_mask(-1, -1, false, 0).left == kUnlimited && make_mask(-1, -1, false, 0).right == kUnlimited);
static_assert(make_mask(-3, -2, false, 0).left == -3 && make_mask(-3, -2, false, 0).right == -2);
static_assert(make_mask(4, 7, true, 0).right == 0 && make_mask(4, 7, true, 0).left == 4);
static_assert(make_mask(kMaxCount, kMaxCount, false, kMaxCount).left == kUnlimited);
static_assert(make_mask(kMaxCount, kMaxCount, false, kMaxCount).chunk == kUnlimited);

static_assert(floor_div(-1, 4) == -1 && floor_div(-4, 4) == -1 && floor_div(-5, 4) == -2 && floor_div(7, 4) == 1);
static_assert(ceil_div(0, 4) == 0 && ceil_div(1, 4) == 1 && ceil_div(kMaxCount, i64{2}) == kMaxCount / 2 + 1);

struct MaskCase {
  Mask mask;
  i64 sq, sk, shift;
};

std::string describe(const MaskCase& t) {
  return "left " + std::to_string(t.mask.left) + " right " + std::to_string(t.mask.right) + " chunk " +
         std::to_string(t.mask.chunk) + " sq " + std::to_string(t.sq) + " sk " + std::to_string(t.sk) + " shift " +
         std::to_string(t.shift);
}

// What the definition says, element by element, with sums over any rectangle in constant time.
class BruteForce {
 public:
  explicit BruteForce(const MaskCase& t) : columns_(static_cast<std::size_t>(t.sk + kPast + 1)) {
    sums_.assign(static_cast<std::size_t>(t.sq + 1) * columns_, 0);
    for (i64 i = 0; i < t.sq; ++i) {
      for (i64 j = 0; j < t.sk + kPast; ++j) {
        const bool seen = visible(t.mask, i + t.shift, j, t.sk);
        at(i + 1, j + 1) = at(i, j + 1) + at(i + 1, j) - at(i, j) + (seen ? 1 : 0);
      }
    }
  }

  // Keys may reach kPast beyond sk.
  i64 pairs(Range rows, Range keys) {
    return at(rows.end, keys.end) - at(rows.begin, keys.end) - at(rows.end, keys.begin) + at(rows.begin, keys.begin);
  }

  static constexpr i64 kPast = 3;

 private:
  i64& at(i64 i, i64 j) { return sums_[static_cast<std::size_t>(i) * columns_ + static_cast<std::size_t>(j)]; }

  std::size_t columns_;
  std::vector<i64> sums_;
};

bool contains(Range range, i64 x) { return range.begin <= x && x < range.end; }

// Each must be exactly the set that the definition gives.
void check_intervals(const MaskCase& t) {
  for (i64 i = 0; i < t.sq; ++i) {
    const Range keys = visible_keys(t.mask, i + t.shift, t.sk);
    ASSERT_TRUE(0 <= keys.begin && keys.begin <= keys.end && keys.end <= t.sk) << describe(t) << " row " << i;
    for (i64 j = -2; j < t.sk + 2; ++j) {
      const bool expected = visible(t.mask, i + t.shift, j, t.sk);
      ASSERT_EQ(contains(keys, j), expected) << describe(t) << " row " << i << " key " << j;
      if (j < 0 || j >= t.sk) continue;
      const Range rows = visible_queries(t.mask, j, t.sq, t.shift);
      ASSERT_EQ(contains(rows, i), expected) << describe(t) << " row " << i << " key " << j;
    }
  }
}

void check_hulls(const MaskCase& t, BruteForce& brute, Range rows, Range keys) {
  const Range seen = key_range(t.mask, rows, t.shift, t.sk);
  for (i64 j = 0; j < t.sk; ++j) {
    ASSERT_EQ(contains(seen, j), brute.pairs(rows, {j, j + 1}) > 0)
        << describe(t) << " rows " << rows.begin << ".." << rows.end << " key " << j;
  }
  const Range real{min_of(keys.begin, t.sk), min_of(keys.end, t.sk)};
  const Range seeing = query_range(t.mask, real, t.sq, t.shift);
  for (i64 i = 0; i < t.sq; ++i) {
    ASSERT_EQ(contains(seeing, i), brute.pairs({i, i + 1}, real) > 0)
        << describe(t) << " keys " << real.begin << ".." << real.end << " row " << i;
  }
}

void check_tile(const MaskCase& t, BruteForce& brute, Range rows, Range keys) {
  const i64 seen = brute.pairs(rows, keys);
  const i64 all = length(rows) * length(keys);
  const TileClass expected = seen == 0 ? TileClass::empty : seen == all ? TileClass::full : TileClass::partial;
  ASSERT_EQ(tile_class(t.mask, rows, keys, t.shift, t.sk), expected)
      << describe(t) << " rows " << rows.begin << ".." << rows.end << " keys " << keys.begin << ".." << keys.end;
}

TEST(Mask, every_small_problem_equals_the_definition) {
  const std::array<i64, 5> sides{0, 1, 2, 5, kUnlimited};
  const std::array<i64, 6> chunks{0, 1, 2, 3, 5, kUnlimited};
  for (const i64 left : sides) {
    for (const i64 right : sides) {
      for (const i64 chunk : chunks) {
        for (i64 shape = 0; shape < 6 * 6; ++shape) {
          for (i64 shift = -9; shift <= 9; ++shift) {
            const MaskCase t{{left, right, chunk}, shape / 6, shape % 6, shift};
            BruteForce brute(t);
            ASSERT_EQ(visible_pairs(t.mask, t.sq, t.sk, shift), brute.pairs({0, t.sq}, {0, t.sk})) << describe(t);
            ASSERT_NO_FATAL_FAILURE(check_intervals(t));
            for (i64 begin = 0; begin <= t.sq; ++begin) {
              for (i64 end = begin; end <= t.sq; ++end) {
                const Range keys{min_of(begin, t.sk), min_of(end, t.sk)};
                ASSERT_NO_FATAL_FAILURE(check_hulls(t, brute, {begin, end}, keys));
                ASSERT_NO_FATAL_FAILURE(check_tile(t, brute, {begin, end}, {keys.begin, keys.end + shape % 3}));
              }
            }
          }
        }
      }
    }
  }
}

class Random {
 public:
  i64 below(i64 limit) { return std::uniform_int_distribution<i64>(0, limit - 1)(engine_); }
  i64 between(i64 low, i64 high) { return low + below(high - low + 1); }

  i64 side(i64 size) { return below(4) == 0 ? kUnlimited : below(size); }

  Range range(i64 size) {
    const i64 a = between(0, size);
    const i64 b = between(0, size);
    return {min_of(a, b), max_of(a, b)};
  }

  MaskCase problem(i64 size) {
    const i64 sq = between(0, size);
    const i64 sk = between(0, size);
    const i64 chunk = below(2) == 0 ? 0 : between(1, size);
    const i64 shift = below(3) == 0 ? sk - sq : between(-2 * size, 2 * size);
    return {{side(size), below(2) == 0 ? 0 : side(size), chunk}, sq, sk, shift};
  }

 private:
  std::mt19937_64 engine_{20240607};
};

TEST(Mask, random_problems_equal_the_definition) {
  Random random;
  std::array<int, 3> classes{};
  for (int repeat = 0; repeat < 20000; ++repeat) {
    const MaskCase t = random.problem(repeat % 2 == 0 ? 24 : 60);
    BruteForce brute(t);
    ASSERT_EQ(visible_pairs(t.mask, t.sq, t.sk, t.shift), brute.pairs({0, t.sq}, {0, t.sk})) << describe(t);
    if (repeat % 8 == 0) {
      ASSERT_NO_FATAL_FAILURE(check_intervals(t));
    }
    for (int tile = 0; tile < 8; ++tile) {
      const Range rows = random.range(t.sq);
      const Range keys = random.range(t.sk + BruteForce::kPast);
      ASSERT_NO_FATAL_FAILURE(check_tile(t, brute, rows, keys));
      ++classes[static_cast<std::size_t>(tile_class(t.mask, rows, keys, t.shift, t.sk))];
      if (tile == 0) {
        ASSERT_NO_FATAL_FAILURE(check_hulls(t, brute, rows, keys));
      }
    }
  }
  for (const int count : classes) EXPECT_GT(count, 3000);
}

TEST(Mask, E06_equal_windows_give_equal_intervals) {
  const i64 s = 16384;
  for (i64 p = 0; p < s; p += 61) {
    const Range causal = visible_keys(make_mask(-1, -1, true, 0), p, s);
    for (const i64 left : {i64{-1}, s, s - 1}) {
      const Range keys = visible_keys(make_mask(left, 0, false, 0), p, s);
      EXPECT_EQ(keys.begin, causal.begin);
      EXPECT_EQ(keys.end, causal.end);
    }
  }
}

// Row sums of the intervals, themselves checked above, are the measure where brute force is too slow.
TEST(Mask, pairs_of_large_problems_are_the_sum_of_their_rows) {
  Random random;
  for (int repeat = 0; repeat < 300; ++repeat) {
    const i64 size = i64{1} << random.between(12, 41);
    const i64 sq = random.between(1, 20000);
    const i64 sk = random.between(1, min_of(size, i64{1} << 40));
    const Mask mask{random.side(size), random.side(size), repeat % 2 == 0 ? 0 : random.between(1, size)};
    const i64 shift = repeat % 3 == 0 ? sk - sq : random.between(-min_of(size, i64{1} << 40), sk);
    i64 expected = 0;
    for (i64 i = 0; i < sq; ++i) expected += length(visible_keys(mask, i + shift, sk));
    ASSERT_EQ(visible_pairs(mask, sq, sk, shift), expected) << describe({mask, sq, sk, shift});
  }
}

// Bounds of rows: every value that an int32 can have, forwards and backwards in memory, or one for all rows.
TEST(Mask, bounds_of_rows_equal_brute_force) {
  Random random;
  const auto bound = [&](i64 sk) {
    return static_cast<i32>(random.between(0, 5) == 0 ? random.between(-(i64{1} << 31), (i64{1} << 31) - 1)
                                                      : random.between(-3, sk + 3));
  };
  for (int repeat = 0; repeat < 3000; ++repeat) {
    const i64 sq = random.between(0, 9), sk = random.between(0, 12), shift = random.between(-8, 12);
    const Mask mask{random.between(0, 2) ? random.between(0, 14) : kUnlimited,
                    random.between(0, 2) ? random.between(0, 14) : kUnlimited,
                    random.between(0, 1) * random.between(0, 6)};
    std::array<i32, 20> begins{}, ends{};
    for (std::size_t at = 0; at < begins.size(); ++at) {
      begins[at] = bound(sk);
      ends[at] = bound(sk);
    }
    const i64 stride = random.between(-2, 2);
    RowBounds bounds;
    if (random.between(0, 3)) bounds.begin = begins.data() + (stride < 0 ? 19 : 0);
    if (random.between(0, 3)) bounds.end = ends.data();
    if (bounds.begin) bounds.begin_stride = stride;
    if (bounds.end) bounds.end_stride = repeat % 3 ? stride * stride / 2 : 0;
    const auto sees = [&](i64 i, i64 j) {
      return visible(mask, i + shift, j, sk) && (!bounds.begin || j >= bounds.begin[i * bounds.begin_stride]) &&
             (!bounds.end || j < bounds.end[i * bounds.end_stride]);
    };
    i64 pairs = 0;
    for (i64 first = 0; first < sq; ++first) {
      const Range own = row_keys(mask, bounds, first, shift, sk);
      for (i64 j = 0; j < sk; ++j) {
        ASSERT_EQ(contains(own, j), sees(first, j))
            << describe({mask, sq, sk, shift}) << " row " << first << " key " << j;
        pairs += sees(first, j);
      }
      ASSERT_TRUE(0 <= own.begin && own.begin <= own.end && own.end <= sk) << describe({mask, sq, sk, shift});
      for (i64 last = first; last <= sq; ++last) {
        Range hull{0, 0};
        for (i64 j = 0; j < sk; ++j)
          for (i64 i = first; i < last; ++i)
            if (sees(i, j)) hull = {hull.begin == hull.end ? j : hull.begin, j + 1};
        const Range found = key_range(mask, bounds, {first, last}, shift, sk);
        ASSERT_EQ(length(found), length(hull)) << describe({mask, sq, sk, shift}) << " rows " << first << ".." << last;
        ASSERT_TRUE(length(hull) == 0 || found.begin == hull.begin) << describe({mask, sq, sk, shift});
      }
    }
    ASSERT_EQ(visible_pairs(mask, bounds, sq, sk, shift), pairs) << describe({mask, sq, sk, shift});
  }
}

TEST(Mask, huge_sizes_do_not_overflow) {
  const i64 n = i64{1} << 31;
  EXPECT_EQ(visible_pairs(kCausal, n, n, 0), n / 2 * (n + 1));
  EXPECT_EQ(visible_pairs(make_mask(1023, 0, false, 0), n, n, 0), 1024 * n - 1024 * 1023 / 2);
  EXPECT_EQ(visible_pairs(make_mask(-1, 0, false, 1 << 13), n, n, 0), (n >> 13) * ((1 << 12) * ((1 << 13) + i64{1})));

  const i64 huge = i64{1} << 40;
  EXPECT_EQ(visible_pairs(Mask{}, huge, huge, 0), kMaxCount);
  EXPECT_EQ(visible_pairs(kCausal, huge, huge, huge), kMaxCount);
  EXPECT_EQ(visible_pairs(Mask{0, 0, 0}, huge, huge, 0), huge);
  EXPECT_EQ(visible_pairs(Mask{0, 0, 3}, huge, huge, 0), huge);
  EXPECT_EQ(visible_pairs(kCausal, huge, huge, -huge), 0);
  EXPECT_EQ(visible_pairs(Mask{kUnlimited, 0, kUnlimited}, 3, huge, huge - 3), 3 * huge - 3);

  const std::array<i64, 6> sides{0, 1, huge - 1, huge, kUnlimited - 1, kUnlimited};
  const std::array<i64, 6> chunks{0, 1, huge - 1, huge, kUnlimited - 1, kUnlimited};
  for (const i64 left : sides) {
    for (const i64 right : sides) {
      for (const i64 chunk : chunks) {
        for (const i64 shift : {-huge, i64{-1}, i64{0}, huge}) {
          const Mask mask{left, right, chunk};
          EXPECT_GE(visible_pairs(mask, huge, huge, shift), 0);
          for (const i64 i : {i64{0}, i64{1}, huge - 1}) {
            const Range keys = visible_keys(mask, i + shift, huge);
            for (const i64 j : {i64{0}, i64{1}, huge - 1}) {
              const bool expected = visible(mask, i + shift, j, huge);
              EXPECT_EQ(contains(keys, j), expected);
              EXPECT_EQ(contains(visible_queries(mask, j, huge, shift), i), expected);
              EXPECT_EQ(tile_class(mask, {i, i + 1}, {j, j + 1}, shift, huge) == TileClass::full, expected);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace narrows
