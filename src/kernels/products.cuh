// The matrix products of a warp on tiles in shared memory: S = Q K^T, O += P V, and what the backward pass makes of them.
//
// Accumulator 2h + e of a 16x8 tile is row lane / 4 + 8h, column 2 (lane % 4) + e. Four lanes, a quad, share a row.
// 16-bit: mma.m16n8k16. fp32: three mma.m16n8k8 on the upper and lower halves of the operands, which are added up from 0 and
// then to the sum in fp32: the tensor core's own accumulation drops bits, and chained over k it is 6 to 22 times worse.
#pragma once
#include "kernels/elements.cuh"
#include "kernels/smem_tile.cuh"

namespace narrows {

constexpr int kDepth =
    kElement == Element::fp32 ? 8 : 16;  // terms of a sum that one instruction adds; fp32: three of them

inline void mma16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (kElement == Element::fp16)
    mma_fp16(d, a, b0, b1);
  else
    mma_bf16(d, a, b0, b1);
}

// fp32 operands as sums of two tf32, of which the tensor core reads the upper 19 bits. high is rounded, so that low is at most
// 2^-11 of it and the product of two lows may be left out. A NaN may leave high, but not low.
template <int n> struct Halves {
  u32 high[n], low[n];
  Halves(const u32 (&x)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      high[i] = (x[i] + 0x1000u) & 0xffffe000u;
      low[i] = as_bits(as_float(x[i]) - as_float(high[i]));
    }
  }
};

inline void mma32(float (&d)[4], const Halves<4>& a, const Halves<2>& b) {
  float sum[4] = {};
  mma_tf32(sum, a.low, b.high[0], b.high[1]);
  mma_tf32(sum, a.high, b.low[0], b.low[1]);
  mma_tf32(sum, a.high, b.high[0], b.high[1]);
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] = __fadd_rn(d[i], sum[i]);
}

// s += a b^T for one step of 32 bytes along both operands' rows: two units.
template <int R, int C> inline void dot_step(float (&s)[R][C][4], const u32 (&a)[R][4], const u32 (&b)[4], int pair) {
#pragma unroll
  for (int t = 0; t < R; ++t)
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if constexpr (kElement == Element::fp32)
        mma32(s[t][2 * pair + n], Halves<4>(a[t]), Halves<2>({b[2 * n], b[2 * n + 1]}));
      else
        mma16(s[t][2 * pair + n], a[t], b[2 * n], b[2 * n + 1]);
    }
}

// s = a b^T: dots of R * 16 rows of tile `left`, from `left_row` on, with C * 8 of tile `right`.
template <SmemTile left, SmemTile right, int R, int C>
inline void multiply_rows(float (&s)[R][C][4], u32 a, int left_row, u32 b, int right_row = 0) {
  static_assert(left.row_bytes == right.row_bytes);
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const UnitAddress<left> from_a(a, left_row + lane % 16, lane / 16);
  const UnitAddress<right> from_b(b, right_row + lane / 16 * 8 + lane % 8, lane / 8 % 2);
#pragma unroll
  for (int t = 0; t < R; ++t)
#pragma unroll
    for (int j = 0; j < C; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[t][j][i] = 0.f;
#pragma unroll kElement == Element::fp32 ? 2 : left.row_bytes
  for (int unit = 0; unit < left.row_bytes / kUnitBytes; unit += 2) {
    u32 rows[R][4];
#pragma unroll
    for (int t = 0; t < R; ++t) load_matrices(from_a.at(unit, 16 * t), rows[t]);
#pragma unroll
    for (int pair = 0; pair < C / 2; ++pair) {
      u32 columns[4];
      load_matrices(from_b.at(unit, 16 * pair), columns);
      dot_step(s, rows, columns, pair);
    }
  }
}

// o += p b, 16-bit: two tiles of p are one operand, as they lie.
template <SmemTile right, int R, int K, int C>
inline void add_product16(float (&o)[R][C][4], const float (&p)[R][K][4], u32 b) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const UnitAddress<right> from_b(b, lane % 16, lane / 16);
#pragma unroll
  for (int step = 0; step < K / 2; ++step) {
    u32 a[R][4];
#pragma unroll
    for (int t = 0; t < R; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[t][i] = pack(p[t][2 * step + i / 2][i % 2 * 2], p[t][2 * step + i / 2][i % 2 * 2 + 1]);
#pragma unroll
    for (int pair = 0; pair < C / 2; ++pair) {
      u32 columns[4];
      load_matrices_transposed(from_b.at(2 * pair, 16 * step), columns);
#pragma unroll
      for (int t = 0; t < R; ++t)
#pragma unroll
        for (int n = 0; n < 2; ++n) mma16(o[t][2 * pair + n], a[t], columns[2 * n], columns[2 * n + 1]);
    }
  }
}

// o += p b, fp32. The order of a sum's terms is free: k index c of the product is row 2c of b, c + 4 row 2c + 1, so that p is
// an operand as it lies; the two rows are read where they are.
template <SmemTile right, int R, int K, int C>
inline void add_product32(float (&o)[R][C][4], const float (&p)[R][K][4], u32 b) {
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const u32 start = b + static_cast<u32>(lane / 4 % 4 * 4);
  const UnitAddress<right> even(start, lane % 4 * 2, lane / 16), odd(start, lane % 4 * 2 + 1, lane / 16);
#pragma unroll
  for (int step = 0; step < K; ++step) {
#pragma unroll
    for (int n = 0; n < C; ++n) {
      const Halves<2> columns({load_shared(even.at(2 * n, 8 * step)), load_shared(odd.at(2 * n, 8 * step))});
#pragma unroll
      for (int t = 0; t < R; ++t) {
        const float(&x)[4] = p[t][step];
        mma32(o[t][n], Halves<4>({as_bits(x[0]), as_bits(x[2]), as_bits(x[1]), as_bits(x[3])}), columns);
      }
    }
  }
}

// o += p b: R * 16 rows of weights, which a warp holds, by K * 8 rows of tile `right`, C * 8 columns of it.
template <SmemTile right, int R, int K, int C>
inline void add_product(float (&o)[R][C][4], const float (&p)[R][K][4], u32 b) {
  if constexpr (kElement == Element::fp32)
    add_product32<right>(o, p, b);
  else
    add_product16<right>(o, p, b);
}

// A warp's part of a tile's columns: an equal piece of each of some chunks, so many that every part that exists is whole.
template <SmemTile of, int warps> struct ColumnPart {
  static constexpr SmemTile tile = of;
  static constexpr int chunk_bytes = tile.chunk_bytes(), chunks = tile.row_bytes / chunk_bytes;

  // Of a part where chunks are cut into so many pieces; 0: that does not come out even.
  static constexpr int chunks_of(int pieces) {
    const int some = ceil_div(chunks, max_of(warps / pieces, 1));
    return warps % pieces == 0 && chunk_bytes / pieces >= 32 && chunks % some == 0 ? some : 0;
  }
  // Those that make the smallest parts.
  static constexpr int best_pieces() {
    int best = 1;
    for (int pieces = 1; pieces <= 4; pieces *= 2) {
      const int some = chunks_of(pieces);
      if (some > 0 && (chunks_of(best) == 0 || some * best < chunks_of(best) * pieces)) best = pieces;
    }
    return best;
  }
  static constexpr int pieces = best_pieces(), piece_bytes = chunk_bytes / pieces;
  static constexpr int bytes = chunks_of(pieces) * piece_bytes, columns = bytes / kElementBytes, tiles = columns / 8;
  static_assert(bytes > 0);

  int first;  // byte of a row

  explicit ColumnPart(int warp)
      : first(warp / pieces * chunks_of(pieces) * chunk_bytes + warp % pieces * piece_bytes) {}
  bool exists() const { return first < tile.row_bytes; }
  // Of the chunk that it begins in. A part that does not exist reads what the first one could, for nothing.
  u32 start(u32 base) const {
    return base + static_cast<u32>(exists() ? first / chunk_bytes * tile.rows * chunk_bytes : 0);
  }
  int unit() const { return first % chunk_bytes / kUnitBytes; }
  // Bytes of a row from the part's first one to those of its n-th 8 columns.
  static constexpr int away(int n) {
    const int byte = n * 8 * kElementBytes;
    return byte / piece_bytes * chunk_bytes + byte % piece_bytes;
  }
  static constexpr int units_away(int n) { return away(n) / kUnitBytes; }
};

// o += a^T b over all rows of both tiles: R * 16 columns of `left` from unit `left_unit` of its first chunk on, C * 8 columns of
// `right`, which are a warp's part.
template <SmemTile left, class Part, int R, int C>
inline void add_crossed(float (&o)[R][C][4], u32 a, int left_unit, u32 tile, const Part& part) {
  constexpr SmemTile right = Part::tile;
  static_assert(left.rows == right.rows && C == Part::tiles);
  const u32 b = part.start(tile);
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  if constexpr (kElement == Element::fp32) {
    const u32 within = static_cast<u32>(lane / 4 % 4 * 4);
    const int row = lane % 4 * 2, unit = lane / 16;
    const UnitAddress<left> a_even(a + within, row, left_unit + unit), a_odd(a + within, row + 1, left_unit + unit);
    const UnitAddress<right> b_even(b + within, row, part.unit() + unit),
        b_odd(b + within, row + 1, part.unit() + unit);
#pragma unroll 2
    for (int step = 0; step < left.rows; step += 8) {
      u32 rows[R][4];
#pragma unroll
      for (int t = 0; t < R; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          rows[t][h] = load_shared(a_even.at(4 * t + 2 * h, step));
          rows[t][h + 2] = load_shared(a_odd.at(4 * t + 2 * h, step));
        }
#pragma unroll
      for (int n = 0; n < C; ++n) {
        const Halves<2> columns(
            {load_shared(b_even.at(Part::units_away(n), step)), load_shared(b_odd.at(Part::units_away(n), step))});
#pragma unroll
        for (int t = 0; t < R; ++t) mma32(o[t][n], Halves<4>(rows[t]), columns);
      }
    }
  } else {
    const UnitAddress<left> from_a(a, lane / 16 * 8 + lane % 8, left_unit + lane / 8 % 2);
    const UnitAddress<right> from_b(b, lane % 16, part.unit() + lane / 16);
#pragma unroll
    for (int step = 0; step < left.rows; step += 16) {
      u32 rows[R][4];
#pragma unroll
      for (int t = 0; t < R; ++t) load_matrices_transposed(from_a.at(2 * t, step), rows[t]);
#pragma unroll
      for (int pair = 0; pair < C / 2; ++pair) {
        u32 columns[4];
        load_matrices_transposed(from_b.at(Part::units_away(2 * pair), step), columns);
#pragma unroll
        for (int t = 0; t < R; ++t)
#pragma unroll
          for (int n = 0; n < 2; ++n) mma16(o[t][2 * pair + n], rows[t], columns[2 * n], columns[2 * n + 1]);
      }
    }
  }
}

// o += a b: R * 16 rows of tile `left` from `left_row` on, by all rows of tile `right`, C * 8 columns of it,
// which are a warp's part. Elements of a row of `left` beyond the rows of `right` are not read. between(n) is called after the
// n-th of right.rows / kDepth equal parts of the work.
template <SmemTile left, class Part, int R, int C, class Between>
inline void add_rows(float (&o)[R][C][4], u32 a, int left_row, u32 tile, const Part& part, const Between& between) {
  constexpr SmemTile right = Part::tile;
  static_assert(C == Part::tiles);
  const u32 b = part.start(tile);
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  if constexpr (kElement == Element::fp32) {
    const u32 pair = a + static_cast<u32>(lane % 2 * 8), within = b + static_cast<u32>(lane / 4 % 4 * 4);
    const UnitAddress<left> from_a(pair, left_row + lane / 4, lane % 4 / 2);
    const UnitAddress<right> even(within, lane % 4 * 2, part.unit() + lane / 16),
        odd(within, lane % 4 * 2 + 1, part.unit() + lane / 16);
#pragma unroll
    for (int step = 0; step < right.rows / kDepth; ++step) {
      u32 rows[R][4];
#pragma unroll
      for (int t = 0; t < R; ++t)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          u32 both[2];
          load_shared64(from_a.at(2 * step, 16 * t + 8 * h), both);
          rows[t][h] = both[0];
          rows[t][h + 2] = both[1];
        }
#pragma unroll
      for (int n = 0; n < C; ++n) {
        const Halves<2> columns(
            {load_shared(even.at(Part::units_away(n), 8 * step)), load_shared(odd.at(Part::units_away(n), 8 * step))});
#pragma unroll
        for (int t = 0; t < R; ++t) mma32(o[t][n], Halves<4>(rows[t]), columns);
      }
      between(step);
    }
  } else {
    const UnitAddress<left> from_a(a, left_row + lane % 16, lane / 16);
    const UnitAddress<right> from_b(b, lane % 16, part.unit() + lane / 16);
#pragma unroll
    for (int step = 0; step < right.rows / kDepth; ++step) {
      u32 rows[R][4];
#pragma unroll
      for (int t = 0; t < R; ++t) load_matrices(from_a.at(2 * step, 16 * t), rows[t]);
#pragma unroll
      for (int pair = 0; pair < C / 2; ++pair) {
        u32 columns[4];
        load_matrices_transposed(from_b.at(Part::units_away(2 * pair), 16 * step), columns);
#pragma unroll
        for (int t = 0; t < R; ++t)
#pragma unroll
          for (int n = 0; n < 2; ++n) mma16(o[t][2 * pair + n], rows[t], columns[2 * n], columns[2 * n + 1]);
      }
      between(step);
    }
  }
}

}  // namespace narrows
