// The decode operations as one text. Part of tile_kernels.inl.hpp.
//
// Scores are dot products with vectors along d, so that K is read in its own order: an accumulator holds one (row, key) pair,
// and four of them are added up across their lanes together. O takes a few keys at a time for all its columns: what they
// hold stays in L1 from one strip of columns to the next.
#include "cpu/decode_kernels.hpp"

#include <utility>

namespace narrows::cpu {
namespace {

// --------------------------------------------------------------------------------------------------- elements of a row

template <class T> struct PlainElements {
  using Element = T;
  static Vector<T> load(const T* source) {
    Vector<T> result;
    __builtin_memcpy(&result, source, sizeof result);
    return result;
  }
};
struct HalfElements {
  using Element = unsigned short;
  static FloatVector load(const unsigned short* source) { return Isa::from_half(source); }
};
struct BfloatElements {
  using Element = unsigned short;
  static FloatVector load(const unsigned short* source) { return Isa::from_bfloat(source); }
};

template <class Elements> const typename Elements::Element* elements(const std::byte* row) {
  return reinterpret_cast<const typename Elements::Element*>(row);
}

/// Calls body with the elements' loader.
template <class T, class Body> void with_elements(DType dtype, const Body& body) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (dtype == DType::fp16) return body(HalfElements{});
    if (dtype == DType::bf16) return body(BfloatElements{});
  }
  body(PlainElements<T>{});
}

// ------------------------------------------------------------------------------------------------------------- prefetching

constexpr i64 kPlacedStep = 8;  // rows between two looks ahead
static_assert(kPlacedAhead % kPlacedStep == 0);

/// How many rows ahead lie about 4 KiB ahead.
inline i64 rows_ahead(i64 row_bytes) {
  const i64 rows = (4096 / row_bytes + kPlacedStep - 1) / kPlacedStep * kPlacedStep;
  return rows < kPlacedStep ? kPlacedStep : rows > kPlacedAhead ? kPlacedAhead : rows;
}

inline void prefetch(const std::byte* const* row, i64 count, i64 row_bytes) {
  constexpr i64 kLine = 64;
  for (i64 r = 0; r < count; ++r)
    for (i64 byte = 0; byte < row_bytes; byte += kLine) __builtin_prefetch(row[r] + byte);
}

// ---------------------------------------------------------------------------------------------------------- sums of lanes

template <class T, int... I> Vector<T> low_pairs(Vector<T> a, Vector<T> b, std::integer_sequence<int, I...>) {
  constexpr int kGroup = 16 / static_cast<int>(sizeof(T)), kAll = static_cast<int>(sizeof...(I));
  return __builtin_shufflevector(a, b, (I / kGroup * kGroup + I % kGroup / 2 + I % 2 * kAll)...);
}
template <class T, int... I> Vector<T> high_pairs(Vector<T> a, Vector<T> b, std::integer_sequence<int, I...>) {
  constexpr int kGroup = 16 / static_cast<int>(sizeof(T)), kAll = static_cast<int>(sizeof...(I));
  return __builtin_shufflevector(a, b, (I / kGroup * kGroup + kGroup / 2 + I % kGroup / 2 + I % 2 * kAll)...);
}
template <class T, int... I> Vector<T> low_halves(Vector<T> a, Vector<T> b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I / 4 * 4 + I % 2 + I % 4 / 2 * static_cast<int>(sizeof...(I)))...);
}
template <class T, int... I> Vector<T> high_halves(Vector<T> a, Vector<T> b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I / 4 * 4 + 2 + I % 2 + I % 4 / 2 * static_cast<int>(sizeof...(I)))...);
}
template <class T> constexpr auto kEachLane = std::make_integer_sequence<int, kLanes<T>>{};

/// What 16-byte groups hold, added up into one.
template <class T, class Sum> void store_groups(const Sum& sum, T* out) {
  if constexpr (sizeof(Sum) == 16) {
    __builtin_memcpy(out, &sum, sizeof sum);
  } else {
    typedef T Half __attribute__((vector_size(sizeof(Sum) / 2)));
    Half half[2];
    __builtin_memcpy(half, &sum, sizeof sum);
    store_groups<T, Half>(half[0] + half[1], out);
  }
}

inline void sums_of_lanes(const FloatVector* a, float* out) {
  const FloatVector left =
      low_pairs<float>(a[0], a[1], kEachLane<float>) + high_pairs<float>(a[0], a[1], kEachLane<float>);
  const FloatVector right =
      low_pairs<float>(a[2], a[3], kEachLane<float>) + high_pairs<float>(a[2], a[3], kEachLane<float>);
  store_groups<float, FloatVector>(
      low_halves<float>(left, right, kEachLane<float>) + high_halves<float>(left, right, kEachLane<float>), out);
}
inline void sums_of_lanes(const DoubleVector* a, double* out) {
  for (int pair = 0; pair < 4; pair += 2)
    store_groups<double, DoubleVector>(low_pairs<double>(a[pair], a[pair + 1], kEachLane<double>) +
                                           high_pairs<double>(a[pair], a[pair + 1], kEachLane<double>),
                                       out + pair);
}

// ---------------------------------------------------------------------------------------------------------------- products

constexpr int kPlacedRows = 4;  // query rows of a register tile

/// Accumulators of a tile: half of the registers.
constexpr int kAccumulators = kVectorBytes == 64 ? 16 : 8;

template <class T, class Elements, int R, int Keys>
void score_tile(const T* q, i64 q_stride, const std::byte* const* row, i64 d, T* s, i64 s_stride) {
  const typename Elements::Element* key[Keys];
  for (int j = 0; j < Keys; ++j) key[j] = elements<Elements>(row[j]);
  Vector<T> sum[R * Keys] = {};
  for (i64 x = 0; x < d; x += kLanes<T>) {
    Vector<T> left[R];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) left[r] = at(q + r * q_stride + x);
#pragma GCC unroll 8
    for (int j = 0; j < Keys; ++j) {
      const Vector<T> k = Elements::load(key[j] + x);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) sum[r * Keys + j] = Isa::fma(left[r], k, sum[r * Keys + j]);
    }
  }
  T sums[R * Keys];
  for (int pair = 0; pair < R * Keys; pair += 4) sums_of_lanes(sum + pair, sums + pair);
  for (int r = 0; r < R; ++r)
    for (int j = 0; j < Keys; ++j) s[r * s_stride + j] = sums[r * Keys + j];
}

/// kPlacedStep keys by R rows.
template <class T, class Elements, int R>
void score_step(const T* q, i64 q_stride, const std::byte* const* row, i64 d, T* s, i64 s_stride) {
  constexpr int kKeys = R == 3 ? 4 : kAccumulators / R > 8 ? 8 : kAccumulators / R;
  for (int key = 0; key < kPlacedStep; key += kKeys)
    score_tile<T, Elements, R, kKeys>(q, q_stride, row + key, d, s + key, s_stride);
}

template <class T, class Elements, int R>
void score_rows(const T* q, i64 q_stride, i64 count, const std::byte* const* row, i64 d, T* s, i64 s_stride) {
  for (; count >= R; count -= R, q += R * q_stride, s += R * s_stride)
    score_step<T, Elements, R>(q, q_stride, row, d, s, s_stride);
  if constexpr (R > 1) {
    if (count) score_rows<T, Elements, R - 1>(q, q_stride, count, row, d, s, s_stride);
  }
}

template <class T> void placed_scores(const T* q, i64 q_stride, i64 count, const PlacedRows& keys, T* s, i64 s_stride) {
  with_elements<T>(keys.dtype, [&](auto kind) {
    using Elements = decltype(kind);
    const i64 row_bytes = keys.length * static_cast<i64>(sizeof(typename Elements::Element));
    const i64 ahead = rows_ahead(row_bytes);
    i64 key = 0;
    for (; key + kPlacedStep <= keys.count; key += kPlacedStep) {
      prefetch(keys.row + key + ahead, kPlacedStep, row_bytes);
      score_rows<T, Elements, kPlacedRows>(q, q_stride, count, keys.row + key, keys.length, s + key, s_stride);
    }
    if (key == keys.count) return;
    prefetch(keys.row + key + ahead, keys.count - key, row_bytes);
    // The last keys, and one of them again in place of those that a whole step lacks.
    const std::byte* last[kPlacedStep];
    for (i64 j = 0; j < kPlacedStep; ++j) last[j] = keys.row[key + j < keys.count ? key + j : key];
    for (i64 r = 0; r < count; ++r) {
      T sums[kPlacedStep];
      score_rows<T, Elements, 1>(q + r * q_stride, q_stride, 1, last, keys.length, sums, kPlacedStep);
      for (i64 j = key; j < keys.count; ++j) s[r * s_stride + j] = sums[j - key];
    }
  });
}

template <class T, class Elements, int R, int Vectors>
void add_strip(const T* p, i64 p_stride, const std::byte* const* row, i64 keys, i64 column, T* o, i64 o_stride) {
  Vector<T> sum[R][Vectors];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) sum[r][v] = at(o + r * o_stride + column + v * kLanes<T>);
  for (i64 key = 0; key < keys; ++key) {
    const typename Elements::Element* const values = elements<Elements>(row[key]) + column;
    Vector<T> value[Vectors];
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) value[v] = Elements::load(values + v * kLanes<T>);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const Vector<T> weight = splat(p[r * p_stride + key]);
#pragma GCC unroll 8
      for (int v = 0; v < Vectors; ++v) sum[r][v] = Isa::fma(weight, value[v], sum[r][v]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < Vectors; ++v) at(o + r * o_stride + column + v * kLanes<T>) = sum[r][v];
}

/// Columns [column, dv) in strips of `Vectors` and, at the end, narrower ones.
template <class T, class Elements, int R, int Vectors>
void add_strips(const T* p, i64 p_stride, const std::byte* const* row, i64 keys, i64 column, i64 dv, T* o,
                i64 o_stride) {
  for (; column + Vectors * kLanes<T> <= dv; column += Vectors * kLanes<T>)
    add_strip<T, Elements, R, Vectors>(p, p_stride, row, keys, column, o, o_stride);
  if constexpr (Vectors > 1) {
    if (column < dv) add_strips<T, Elements, R, Vectors / 2>(p, p_stride, row, keys, column, dv, o, o_stride);
  }
}

template <class T, class Elements, int R>
void add_rows(const T* p, i64 p_stride, i64 count, const std::byte* const* row, i64 keys, i64 dv, T* o, i64 o_stride) {
  constexpr int kVectors = R == 3 ? kAccumulators / 4 : kAccumulators / R > 8 ? 8 : kAccumulators / R;
  for (; count >= R; count -= R, p += R * p_stride, o += R * o_stride)
    add_strips<T, Elements, R, kVectors>(p, p_stride, row, keys, 0, dv, o, o_stride);
  if constexpr (R > 1) {
    if (count) add_rows<T, Elements, R - 1>(p, p_stride, count, row, keys, dv, o, o_stride);
  }
}

template <class T>
void placed_accumulate(const T* p, i64 p_stride, i64 count, const PlacedRows& values, T* o, i64 o_stride) {
  with_elements<T>(values.dtype, [&](auto kind) {
    using Elements = decltype(kind);
    const i64 row_bytes = values.length * static_cast<i64>(sizeof(typename Elements::Element));
    const i64 ahead = rows_ahead(row_bytes);
    for (i64 key = 0; key < values.count; key += kPlacedStep) {
      const i64 keys = values.count - key < kPlacedStep ? values.count - key : kPlacedStep;
      prefetch(values.row + key + ahead, keys, row_bytes);
      add_rows<T, Elements, kPlacedRows>(p + key, p_stride, count, values.row + key, keys, values.length, o, o_stride);
    }
  });
}

template <class T> constexpr DecodeKernels<T> kDecodeKernels{kLanes<T>, placed_scores<T>, placed_accumulate<T>};

}  // namespace
}  // namespace narrows::cpu
