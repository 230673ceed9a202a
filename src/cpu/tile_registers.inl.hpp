// Products by tile registers of 16 rows of 64 bytes, which the including file gives as TileRegisters: 2 x 2 of sums, two of
// rows from the left operand and two of columns from the right one. The left operand is row-major bf16, as query panels
// [rows][d] and rows of weights are; 32 elements of `columns` of the right one are 16 rows of pairs. Part of
// tile_kernels_registers.inl.hpp.

namespace narrows::cpu {
namespace {

constexpr int kTileRows = 16;
static_assert(Isa::kRows == 2 * kTileRows && kDepth == kUnit && kVectorBytes == 64);
constexpr i64 kRightBytes = kDepth / 2 * 2 * kVectorBytes;  // of a strip, of one depth

template <class T> void pack_query(const Rows& source, T sign, Packed* panel) {
  const i64 row_bytes = whole(source.length, kDepth) * i64{sizeof(Bfloat)};
  for (int row = 0; row < Isa::kRows; ++row) read_row(source, row, 0, source.length, sign, panel + row * row_bytes);
}

struct Left {
  const Packed* start;
  i64 row_bytes, depth_bytes;  // to the next row, and to the same row's next elements
};

// out += left * right, or = where it does not add. Below: there are rows for the lower half of the tile; Right: and columns
// for the right one.
template <bool Adds, bool Below, bool Right>
void multiply_strip(TileRegisters& tiles, const Left& left, const Packed* right, i64 depths, float* out, i64 ld) {
  const i64 stride = ld * i64{sizeof(float)};
  float* const below = out + kTileRows * ld;
  if constexpr (Adds) {
    tiles.load_sum<0, 0>(out, stride);
    if constexpr (Right) tiles.load_sum<0, 1>(out + kTileRows, stride);
    if constexpr (Below) tiles.load_sum<1, 0>(below, stride);
    if constexpr (Below && Right) tiles.load_sum<1, 1>(below + kTileRows, stride);
  } else {
    tiles.clear_sum<0, 0>();
    if constexpr (Right) tiles.clear_sum<0, 1>();
    if constexpr (Below) tiles.clear_sum<1, 0>();
    if constexpr (Below && Right) tiles.clear_sum<1, 1>();
  }
  const Packed* rows = left.start;
  for (i64 depth = 0; depth < depths; ++depth, rows += left.depth_bytes, right += kRightBytes) {
    tiles.load_right<0>(right, 2 * kVectorBytes);
    tiles.load_left<0>(rows, left.row_bytes);
    tiles.dot<0, 0>();
    if constexpr (Right) {
      tiles.load_right<1>(right + kVectorBytes, 2 * kVectorBytes);
      tiles.dot<0, 1>();
    }
    if constexpr (Below) {
      tiles.load_left<1>(rows + kTileRows * left.row_bytes, left.row_bytes);
      tiles.dot<1, 0>();
    }
    if constexpr (Below && Right) tiles.dot<1, 1>();
  }
  tiles.store_sum<0, 0>(out, stride);
  if constexpr (Right) tiles.store_sum<0, 1>(out + kTileRows, stride);
  if constexpr (Below) tiles.store_sum<1, 0>(below, stride);
  if constexpr (Below && Right) tiles.store_sum<1, 1>(below + kTileRows, stride);
}

template <bool Below>
void scores_rows(TileRegisters& tiles, const Left& panel, const Packed* keys, i64 strips, i64 depths, float* s,
                 i64 ld) {
  for (i64 strip = 0; strip < strips; ++strip, keys += depths * kRightBytes)
    multiply_strip<false, Below, true>(tiles, panel, keys, depths, s + strip * kUnit, ld);
}

template <class T> void scores(const Packed* panel, int count, const Packed* keys, i64 strips, i64 d, T* s, i64 ld) {
  TileRegisters tiles(count);
  const i64 depths = whole(d, kDepth) / kDepth;
  const Left left{panel, depths * kVectorBytes, kVectorBytes};
  if (count > kTileRows)
    scores_rows<true>(tiles, left, keys, strips, depths, s, ld);
  else
    scores_rows<false>(tiles, left, keys, strips, depths, s, ld);
}

template <bool Below>
void accumulate_rows(TileRegisters& tiles, const Left& weights, const Packed* values, i64 strip_stride, i64 keys,
                     i64 width, float* o, i64 o_ld) {
  for (i64 from = 0; from < width; from += kUnit, values += strip_stride * i64{sizeof(Bfloat)}) {
    if (width - from > kTileRows)
      multiply_strip<true, Below, true>(tiles, weights, values, keys / kDepth, o + from, o_ld);
    else
      multiply_strip<true, Below, false>(tiles, weights, values, keys / kDepth, o + from, o_ld);
  }
}

inline void accumulate_left(const Left& weights, int count, const Packed* values, i64 strip_stride, i64 keys, i64 width,
                            float* o, i64 o_ld) {
  TileRegisters tiles(count);
  if (count > kTileRows)
    accumulate_rows<true>(tiles, weights, values, strip_stride, keys, width, o, o_ld);
  else
    accumulate_rows<false>(tiles, weights, values, strip_stride, keys, width, o, o_ld);
}

template <class T>
void accumulate(const T* p, i64 ld, int count, const Packed* values, i64 strip_stride, i64 keys, i64 width, T* o,
                i64 o_ld) {
  accumulate_left({reinterpret_cast<const Packed*>(p), ld * i64{sizeof(T)}, kVectorBytes}, count, values, strip_stride,
                  keys, width, o, o_ld);
}

// P^T in blocks of one depth of rows: [rows / depth][ld][depth], so that a tile is one piece of memory.
template <class T> const Packed* transposed(const T* p, i64 ld, i64 rows, i64 columns, Packed* out) {
  for (i64 row = 0; row < rows; row += kDepth)
    for (i64 column = 0; column < columns; column += kLanes<T>) {
      IntVector block[kLanes<T>];
#pragma GCC unroll 16
      for (int pair = 0; pair < kLanes<T>; ++pair) block[pair] = paired_rows(p + (row + 2 * pair) * ld, ld, column);
      transpose_square<1>(block);
      Packed* const target = out + (row / kDepth * ld + column) * kVectorBytes;
#pragma GCC unroll 16
      for (int line = 0; line < kLanes<T>; ++line) bits_at(target + line * kVectorBytes) = block[line];
    }
  return out;
}

template <class T>
void accumulate_transposed(const Packed* p, i64 ld, i64 first_row, i64 first_column, int count, const Packed* values,
                           i64 strip_stride, i64 keys, i64 width, T* o, i64 o_ld) {
  accumulate_left({p + (first_row / kDepth * ld + first_column) * kVectorBytes, kVectorBytes, ld * kVectorBytes}, count,
                  values, strip_stride, keys, width, o, o_ld);
}

}  // namespace
}  // namespace narrows::cpu
