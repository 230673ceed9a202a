// Which keys a query sees. A query row i stands at position p = i + shift and sees key j of [0, sk) when
// p - left <= j <= p + right and, with chunks, floor(j / chunk) == floor(p / chunk).
//
// Two facts carry everything below; both need left, right >= 0.
// - The rules are intervals of j, so a row sees one interval [B(p), E(p)). B is a maximum and E a minimum of terms that
// never
//   fall as p grows (0, p - left, chunk start; sk, p + right + 1, chunk end), and clipping to [0, sk] keeps that:
//   both ends are monotone in p.
// - B(p + 1) <= E(p): a row whose p is in [0, sk) sees key p itself, rows before 0 end where 0 begins to be seen, rows
// past
//   sk begin at most at sk. So the keys seen by consecutive rows have no gap, and the first and last row give the exact
//   hull.
// The same holds with queries and keys exchanged.
//
// A call may bound each row's keys besides (RowBounds). Rows then see an interval still, but neither fact holds.
//
// Lengths and |shift| up to 2^40, |p| and |j| up to 2^41, sides and chunk up to 2^61: no sum here overflows.
#pragma once
#include "shared/params.h"

namespace narrows {

// Normalised: sides in [0, kUnlimited]; causal is right = 0; chunk 0 is none.
struct Mask {
  i64 left = kUnlimited;
  i64 right = kUnlimited;
  i64 chunk = 0;
};

// Half open; empty when begin >= end.
struct Range {
  i64 begin = 0;
  i64 end = 0;
};

// Of the rows of one sequence: row i sees no key before begin[i] and none from end[i] on, whatever the numbers. A null
// one bounds nothing.
struct RowBounds {
  const i32* begin = nullptr;
  const i32* end = nullptr;
  i64 begin_stride = 0, end_stride = 0;  // elements

  constexpr bool given() const { return begin != nullptr || end != nullptr; }
  constexpr bool same_for_all() const { return begin_stride == 0 && end_stride == 0; }
};

enum class TileClass { empty, partial, full };

// From a user's values: -1 is unlimited, causal takes the right side's place. Other negative sides are errors that
// Problem reports; they are not taken for unlimited here either.
constexpr Mask make_mask(i64 left, i64 right, bool causal, i64 chunk) {
  Mask mask;
  mask.left = left == -1 ? kUnlimited : min_of(left, kUnlimited);
  mask.right = causal ? 0 : right == -1 ? kUnlimited : min_of(right, kUnlimited);
  mask.chunk = min_of(chunk, kUnlimited);
  return mask;
}

constexpr i64 length(Range range) { return max_of(range.end - range.begin, i64{0}); }

constexpr Range intersect(Range a, Range b) { return {max_of(a.begin, b.begin), min_of(a.end, b.end)}; }

// One pair, from the definition.
constexpr bool visible(const Mask& mask, i64 p, i64 j, i64 sk) {
  return 0 <= j && j < sk && p - mask.left <= j && j <= p + mask.right &&
         (mask.chunk == 0 || floor_div(j, mask.chunk) == floor_div(p, mask.chunk));
}

// The keys that a query at position p sees; both ends lie in [0, sk] and begin <= end.
constexpr Range visible_keys(const Mask& mask, i64 p, i64 sk) {
  Range keys{p - mask.left, p + mask.right + 1};
  if (mask.chunk != 0) {
    const i64 start = floor_div(p, mask.chunk) * mask.chunk;
    keys = intersect(keys, {start, start + mask.chunk});
  }
  return {clamp_to(keys.begin, i64{0}, sk), clamp_to(keys.end, i64{0}, sk)};
}

// Those of `keys` that row i is let see. begin <= end in both.
constexpr Range bounded(const RowBounds& bounds, i64 i, Range keys) {
  if (bounds.begin) keys.begin = clamp_to(i64{bounds.begin[i * bounds.begin_stride]}, keys.begin, keys.end);
  if (bounds.end) keys.end = clamp_to(i64{bounds.end[i * bounds.end_stride]}, keys.begin, keys.end);
  return keys;
}

// The keys that row i sees: all rules together.
constexpr Range row_keys(const Mask& mask, const RowBounds& bounds, i64 i, i64 shift, i64 sk) {
  return bounded(bounds, i, visible_keys(mask, i + shift, sk));
}

// The rows of [0, sq) that see key j; j is a key that exists.
constexpr Range visible_queries(const Mask& mask, i64 j, i64 sq, i64 shift) {
  Range positions{j - mask.right, j + mask.left + 1};
  if (mask.chunk != 0) {
    const i64 start = floor_div(j, mask.chunk) * mask.chunk;
    positions = intersect(positions, {start, start + mask.chunk});
  }
  return {clamp_to(positions.begin - shift, i64{0}, sq), clamp_to(positions.end - shift, i64{0}, sq)};
}

// The keys seen by at least one of the rows: an interval, by the second fact.
constexpr Range key_range(const Mask& mask, Range rows, i64 shift, i64 sk) {
  if (rows.begin >= rows.end) return {0, 0};
  return {visible_keys(mask, rows.begin + shift, sk).begin, visible_keys(mask, rows.end - 1 + shift, sk).end};
}

// From the first to the last key that one of the rows sees.
constexpr Range key_range(const Mask& mask, const RowBounds& bounds, Range rows, i64 shift, i64 sk) {
  if (rows.begin >= rows.end) return {0, 0};
  if (bounds.same_for_all()) return bounded(bounds, rows.begin, key_range(mask, rows, shift, sk));
  Range hull{sk, 0};
  for (i64 i = rows.begin; i < rows.end; ++i) {
    const Range keys = row_keys(mask, bounds, i, shift, sk);
    if (keys.begin < keys.end) hull = {min_of(hull.begin, keys.begin), max_of(hull.end, keys.end)};
  }
  return hull.begin < hull.end ? hull : Range{0, 0};
}

// The rows that see at least one of the keys.
constexpr Range query_range(const Mask& mask, Range keys, i64 sq, i64 shift) {
  if (keys.begin >= keys.end) return {0, 0};
  return {visible_queries(mask, keys.begin, sq, shift).begin, visible_queries(mask, keys.end - 1, sq, shift).end};
}

// Exact: empty if no pair of rows x keys is visible, full if all are. Rows must exist; keys may reach past sk.
constexpr TileClass tile_class(const Mask& mask, Range rows, Range keys, i64 shift, i64 sk) {
  if (rows.begin >= rows.end) return TileClass::empty;
  const Range first = visible_keys(mask, rows.begin + shift, sk);
  const Range last = visible_keys(mask, rows.end - 1 + shift, sk);
  if (max_of(first.begin, keys.begin) >= min_of(last.end, keys.end)) return TileClass::empty;
  return last.begin <= keys.begin && keys.end <= first.end ? TileClass::full : TileClass::partial;
}

// Counts saturate: 2^40 rows by 2^40 keys is no 64-bit number.
constexpr i64 kMaxCount = static_cast<i64>(~u64{0} >> 1);

constexpr i64 saturating_add(i64 a, i64 b) { return a > kMaxCount - b ? kMaxCount : a + b; }

constexpr i64 saturating_multiply(i64 a, i64 b) { return b != 0 && a > kMaxCount / b ? kMaxCount : a * b; }

// Sum of the widths of consecutive rows whose widths form an arithmetic series of step -1, 0 or 1. Either the number of
// rows or the sum of first and last is even, so halving before the product is exact.
constexpr i64 series_sum(i64 rows, i64 first, i64 last) {
  return rows % 2 == 0 ? saturating_multiply(rows / 2, first + last) : saturating_multiply(rows, (first + last) / 2);
}

// Visible pairs without chunks, rows at positions [positions.begin, positions.end).
constexpr i64 band_pairs(const Mask& mask, Range positions, i64 sk) {
  // Other rows see nothing. Of these, E stops growing at sk - right - 1 and B starts to at left: three linear pieces.
  const Range rows = intersect(positions, {-mask.right, sk + mask.left});
  if (rows.begin >= rows.end || sk == 0) return 0;
  const Mask band{mask.left, mask.right, 0};
  const i64 a = clamp_to(min_of(sk - mask.right - 1, mask.left), rows.begin, rows.end);
  const i64 b = clamp_to(max_of(sk - mask.right - 1, mask.left), rows.begin, rows.end);
  const Range pieces[] = {{rows.begin, a}, {a, b}, {b, rows.end}};
  i64 total = 0;
  for (const Range& piece : pieces) {
    if (piece.begin >= piece.end) continue;
    const i64 first = length(visible_keys(band, piece.begin, sk));
    const i64 last = length(visible_keys(band, piece.end - 1, sk));
    total = saturating_add(total, series_sum(piece.end - piece.begin, first, last));
  }
  return total;
}

// Visible pairs of sq rows and sk keys in constant time; kMaxCount where there are more than that.
constexpr i64 visible_pairs(const Mask& mask, i64 sq, i64 sk, i64 shift) {
  const Range positions{shift, shift + sq};
  if (mask.chunk == 0) return band_pairs(mask, positions, sk);
  if (sq == 0 || sk == 0) return 0;
  // A chunk is a band problem of its own. Rows cut the first and last one, keys only the last: those between are equal.
  const i64 first = max_of(floor_div(shift, mask.chunk), i64{0});
  const i64 last = min_of(floor_div(positions.end - 1, mask.chunk), floor_div(sk - 1, mask.chunk));
  if (first > last) return 0;
  const auto chunk_pairs = [&](i64 index) {
    const i64 start = index * mask.chunk;
    const Range rows = intersect({positions.begin - start, positions.end - start}, {0, mask.chunk});
    return band_pairs(mask, rows, min_of(sk - start, mask.chunk));
  };
  i64 total = chunk_pairs(first);
  if (last > first) total = saturating_add(total, chunk_pairs(last));
  if (last > first + 1) {
    total = saturating_add(total, saturating_multiply(last - first - 1, chunk_pairs(first + 1)));
  }
  return total;
}

constexpr i64 visible_pairs(const Mask& mask, const RowBounds& bounds, i64 sq, i64 sk, i64 shift) {
  if (sq == 0) return 0;
  i64 total = 0;
  if (bounds.same_for_all()) {  // of the keys before the end, less those before the beginning
    const Range keys = bounded(bounds, 0, {0, sk});
    return visible_pairs(mask, sq, keys.end, shift) - visible_pairs(mask, sq, keys.begin, shift);
  }
  for (i64 i = 0; i < sq; ++i) total = saturating_add(total, length(row_keys(mask, bounds, i, shift, sk)));
  return total;
}

}  // namespace narrows
