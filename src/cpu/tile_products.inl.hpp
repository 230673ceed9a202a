// Packing and products of operands of type T, by multiply-adds. Part of tile_kernels.inl.hpp.

namespace narrows::cpu {
namespace {

template <class T> constexpr DType kOperand = sizeof(T) == sizeof(float) ? DType::fp32 : DType::fp64;
constexpr int kDepth = 1;

// --------------------------------------------------------------------------------------------------------------- packing

// rows x length to [length][Width], through pieces that stay in L1 between the conversion and the transposition.
template <int Width, class T> void transpose(const Rows& source, i64 first, T sign, T* out) {
  alignas(kVectorBytes) T piece[Width][kPiece];
  for (i64 from = 0; from < source.length; from += kPiece) {
    const i64 count = source.length - from < kPiece ? source.length - from : kPiece;
    for (int row = 0; row < Width; ++row) {
      if (from == 0) prefetch_row(source, first + row + Width);
      convert_or_clear(source, first + row, from, count, piece[row]);
      if (sign != T{1})
        for (i64 x = 0; x < count; ++x) piece[row][x] *= sign;
    }
    transpose_piece<Width>(piece[0], count, out + from * Width);
  }
}

template <class T> void pack_query(const Rows& source, T sign, Packed* panel) {
  transpose<Isa::kRows>(source, 0, sign, reinterpret_cast<T*>(panel));
}

template <class T> void pack_keys(const Rows& source, Packed* strips) {
  for (i64 first = 0; first < source.count; first += kColumns<T>)
    transpose<kColumns<T>>(source, first, T{1}, reinterpret_cast<T*>(strips) + first * source.length);
}

// Rows that are converted together, so that each strip gets several neighbouring lines at once.
template <class T> constexpr int kValueRows = kColumns<T> < 8 ? kColumns<T> : 8;

template <class T> void pack_values(const Rows& source, Packed* strips) {
  const i64 keys = (source.count + kColumns<T> - 1) / kColumns<T> * kColumns<T>;
  alignas(kVectorBytes) T piece[kValueRows<T>][kPiece];
  for (i64 key = 0; key < keys; key += kValueRows<T>) {
    T* strip = reinterpret_cast<T*>(strips) + key * kColumns<T>;
    for (i64 from = 0; from < source.length; from += kPiece) {
      const i64 count = source.length - from < kPiece ? source.length - from : kPiece;
      for (int row = 0; row < kValueRows<T>; ++row) {
        if (from == 0) prefetch_row(source, key + row + 2 * kValueRows<T>);
        convert_or_clear(source, key + row, from, count, piece[row]);
        for (i64 x = count; x % kColumns<T> != 0; ++x) piece[row][x] = T{0};
      }
      for (i64 column = 0; column < count; column += kColumns<T>, strip += keys * kColumns<T>)
        for (int row = 0; row < kValueRows<T>; ++row) {
          at(strip + row * kColumns<T>) = at(piece[row] + column);
          at(strip + row * kColumns<T> + kLanes<T>) = at(piece[row] + column + kLanes<T>);
        }
    }
  }
}

template <class T> bool all_finite(const Packed* values, i64 count) {
  Vector<T> sum = {};
  for (i64 x = 0; x < count; x += kLanes<T>) sum += at(reinterpret_cast<const T*>(values) + x) * T{0};
  bool finite = true;
  for (int lane = 0; lane < kLanes<T>; ++lane) finite = finite && sum[lane] == T{0};
  return finite;
}

// -------------------------------------------------------------------------------------------------------------- products

// Strips stream from L2 past the panel in L1; asked for so many steps ahead they arrive in time (2-3% of a product).
template <class T> inline void prefetch_step(const T* strip) {
  constexpr int kAhead = 16;
  const std::byte* const ahead = reinterpret_cast<const std::byte*>(strip + kAhead * kColumns<T>);
  for (int byte = 0; byte < 2 * kVectorBytes; byte += 64) __builtin_prefetch(ahead + byte);
}

// Each accumulator is one chain over x in ascending order, whatever R is: a row's bits do not depend on its panel.
template <class T, int R> void scores_strip(const T* panel, const T* keys, i64 d, T* s, i64 ld) {
  Vector<T> sum[R][2] = {};
  for (i64 x = 0; x < d; ++x, panel += Isa::kRows, keys += kColumns<T>) {
    const Vector<T> left = at(keys), right = at(keys + kLanes<T>);
    prefetch_step(keys);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const Vector<T> q = splat(panel[r]);
      sum[r][0] = Isa::fma(q, left, sum[r][0]);
      sum[r][1] = Isa::fma(q, right, sum[r][1]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    at(s + r * ld) = sum[r][0];
    at(s + r * ld + kLanes<T>) = sum[r][1];
  }
}

// Weights stand at p[r][key], or transposed at p[key][r].
template <class T, int R, int Vectors, bool Transposed>
void accumulate_strip(const T* p, i64 ld, const T* values, i64 keys, T* o, i64 o_ld) {
  Vector<T> sum[R][Vectors];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < Vectors; ++v) sum[r][v] = at(o + r * o_ld + v * kLanes<T>);
  for (i64 key = 0; key < keys; ++key, values += kColumns<T>) {
    Vector<T> value[Vectors];
    for (int v = 0; v < Vectors; ++v) value[v] = at(values + v * kLanes<T>);
    prefetch_step(values);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const Vector<T> weight = splat(Transposed ? p[key * ld + r] : p[r * ld + key]);
      for (int v = 0; v < Vectors; ++v) sum[r][v] = Isa::fma(weight, value[v], sum[r][v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < Vectors; ++v) at(o + r * o_ld + v * kLanes<T>) = sum[r][v];
}

template <class T, int R> void scores_rows(const T* panel, int count, const T* keys, i64 strips, i64 d, T* s, i64 ld) {
  if constexpr (R > 1) {
    if (count < R) return scores_rows<T, R - 1>(panel, count, keys, strips, d, s, ld);
  }
  for (i64 strip = 0; strip < strips; ++strip)
    scores_strip<T, R>(panel, keys + strip * d * kColumns<T>, d, s + strip * kColumns<T>, ld);
}

template <class T> void scores(const Packed* panel, int count, const Packed* keys, i64 strips, i64 d, T* s, i64 ld) {
  scores_rows<T, Isa::kRows>(reinterpret_cast<const T*>(panel), count, reinterpret_cast<const T*>(keys), strips, d, s,
                             ld);
}

template <class T, int R, bool Transposed>
void accumulate_rows(const T* p, i64 ld, int count, const T* values, i64 strip_stride, i64 keys, i64 width, T* o,
                     i64 o_ld) {
  if constexpr (R > 1) {
    if (count < R)
      return accumulate_rows<T, R - 1, Transposed>(p, ld, count, values, strip_stride, keys, width, o, o_ld);
  }
  for (i64 from = 0; from < width; from += kColumns<T>, values += strip_stride) {
    if (width - from > kLanes<T>)
      accumulate_strip<T, R, 2, Transposed>(p, ld, values, keys, o + from, o_ld);
    else
      accumulate_strip<T, R, 1, Transposed>(p, ld, values, keys, o + from, o_ld);
  }
}

template <class T>
void accumulate(const T* p, i64 ld, int count, const Packed* values, i64 strip_stride, i64 keys, i64 width, T* o,
                i64 o_ld) {
  accumulate_rows<T, Isa::kRows, false>(p, ld, count, reinterpret_cast<const T*>(values), strip_stride, keys, width, o,
                                        o_ld);
}

template <class T>
void accumulate_transposed(const Packed* p, i64 ld, i64 first_row, i64 first_column, int count, const Packed* values,
                           i64 strip_stride, i64 keys, i64 width, T* o, i64 o_ld) {
  accumulate_rows<T, Isa::kRows, true>(reinterpret_cast<const T*>(p) + first_row * ld + first_column, ld, count,
                                       reinterpret_cast<const T*>(values), strip_stride, keys, width, o, o_ld);
}

// Both products read P and dS as they are.
template <class T> void narrow(T*, i64) {}
template <class T> const Packed* transposed(const T* p, i64, i64, i64, Packed*) {
  return reinterpret_cast<const Packed*>(p);
}

/// 2^x as exactly as weights of T need it.
template <class T> inline Vector<T> weight_exp2(Vector<T> x) { return exp2_vector<T>(x); }

template <class T> inline void put_weights(T* s, i64 column, Vector<T> left, Vector<T> right) {
  at(s + column) = left;
  at(s + column + kLanes<T>) = right;
}

}  // namespace
}  // namespace narrows::cpu
