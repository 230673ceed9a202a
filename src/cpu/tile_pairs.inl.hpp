// Products by dot products of bf16 pairs. A query panel is [d / 2][rows] dwords, what accumulate_transposed reads
// [rows / 2][ld]. Part of tile_kernels_pairs.inl.hpp.

namespace narrows::cpu {
namespace {

template <class T> void pack_query(const Rows& source, T sign, Packed* panel) {
  transpose_pairs<Isa::kRows>(source, 0, sign, reinterpret_cast<float*>(panel));
}

inline IntVector splat_pair(const Pair* p) {
  const int pair = *p;
  return IntVector{} + pair;
}

// As in tile_products.inl.hpp.
inline void prefetch_step(const Packed* strip) {
  constexpr int kAhead = 16;
  for (int byte = 0; byte < 2 * kVectorBytes; byte += 64) __builtin_prefetch(strip + kAhead * 2 * kVectorBytes + byte);
}

// Each accumulator is one chain over the pairs in ascending order, whatever R is: a row's bits do not depend on its panel.
template <int R> void scores_strip(const Pair* panel, const Packed* keys, i64 pairs, float* s, i64 ld) {
  FloatVector sum[R][2] = {};
  for (i64 pair = 0; pair < pairs; ++pair, panel += Isa::kRows, keys += 2 * kVectorBytes) {
    const IntVector left = bits_at(keys), right = bits_at(keys + kVectorBytes);
    prefetch_step(keys);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const IntVector q = splat_pair(panel + r);
      sum[r][0] = Isa::dot(sum[r][0], q, left);
      sum[r][1] = Isa::dot(sum[r][1], q, right);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    at(s + r * ld) = sum[r][0];
    at(s + r * ld + kLanes<float>) = sum[r][1];
  }
}

// Pairs of weights stand at p[r][pair], or transposed at p[pair][r].
template <int R, int Vectors, bool Transposed>
void accumulate_strip(const Pair* p, i64 ld, const Packed* values, i64 pairs, float* o, i64 o_ld) {
  FloatVector sum[R][Vectors];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < Vectors; ++v) sum[r][v] = at(o + r * o_ld + v * kLanes<float>);
  for (i64 pair = 0; pair < pairs; ++pair, values += 2 * kVectorBytes) {
    IntVector value[Vectors];
    for (int v = 0; v < Vectors; ++v) value[v] = bits_at(values + v * kVectorBytes);
    prefetch_step(values);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const IntVector weight = splat_pair(Transposed ? p + pair * ld + r : p + r * ld + pair);
      for (int v = 0; v < Vectors; ++v) sum[r][v] = Isa::dot(sum[r][v], weight, value[v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < Vectors; ++v) at(o + r * o_ld + v * kLanes<float>) = sum[r][v];
}

template <int R>
void scores_rows(const Pair* panel, int count, const Packed* keys, i64 strips, i64 pairs, float* s, i64 ld) {
  if constexpr (R > 1) {
    if (count < R) return scores_rows<R - 1>(panel, count, keys, strips, pairs, s, ld);
  }
  for (i64 strip = 0; strip < strips; ++strip, keys += pairs * 2 * kVectorBytes)
    scores_strip<R>(panel, keys, pairs, s + strip * kColumns<float>, ld);
}

template <class T> void scores(const Packed* panel, int count, const Packed* keys, i64 strips, i64 d, T* s, i64 ld) {
  scores_rows<Isa::kRows>(reinterpret_cast<const Pair*>(panel), count, keys, strips, whole(d, 2) / 2, s, ld);
}

template <int R, bool Transposed>
void accumulate_rows(const Pair* p, i64 ld, int count, const Packed* values, i64 strip_stride, i64 pairs, i64 width,
                     float* o, i64 o_ld) {
  if constexpr (R > 1) {
    if (count < R) return accumulate_rows<R - 1, Transposed>(p, ld, count, values, strip_stride, pairs, width, o, o_ld);
  }
  for (i64 from = 0; from < width; from += kColumns<float>, values += strip_stride * i64{sizeof(Bfloat)}) {
    if (width - from > kLanes<float>)
      accumulate_strip<R, 2, Transposed>(p, ld, values, pairs, o + from, o_ld);
    else
      accumulate_strip<R, 1, Transposed>(p, ld, values, pairs, o + from, o_ld);
  }
}

template <class T>
void accumulate(const T* p, i64 ld, int count, const Packed* values, i64 strip_stride, i64 keys, i64 width, T* o,
                i64 o_ld) {
  accumulate_rows<Isa::kRows, false>(reinterpret_cast<const Pair*>(p), ld, count, values, strip_stride, keys / 2, width,
                                     o, o_ld);
}

template <class T> const Packed* transposed(const T* p, i64 ld, i64 rows, i64 columns, Packed* out) {
  for (i64 row = 0; row < rows; row += 2)
    for (i64 column = 0; column < columns; column += kLanes<T>)
      bits_at(out + (row / 2 * ld + column) * i64{sizeof(Pair)}) = paired_rows(p + row * ld, ld, column);
  return out;
}

template <class T>
void accumulate_transposed(const Packed* p, i64 ld, i64 first_row, i64 first_column, int count, const Packed* values,
                           i64 strip_stride, i64 keys, i64 width, T* o, i64 o_ld) {
  accumulate_rows<Isa::kRows, true>(reinterpret_cast<const Pair*>(p) + first_row / 2 * ld + first_column, ld, count,
                                    values, strip_stride, keys / 2, width, o, o_ld);
}

}  // namespace
}  // namespace narrows::cpu
