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

constexpr i64 kPlacedStep = 8;  // keys

/// Asks for lines of later rows in their order, as many in each of some steps and a few at a time: the core waits when it has
/// asked for more than it can have under way. Into L2: what is asked for is often as large as L1, and what falls out of it
/// there was asked for in vain.
class Fetching {
 public:
  Fetching(const LaterRows& rows, i64 steps) : row_(rows.row), rows_(rows.count), bytes_(rows.bytes) {
    const i64 lines = rows_ * ((bytes_ + kLine - 1) / kLine);
    step_lines_ = steps > 0 ? (lines + steps - 1) / steps : 0;
  }
  void begin_step(i64 parts) {
    left_ = step_lines_;
    part_lines_ = (step_lines_ + parts - 1) / parts;
  }
  void part() { fetch(part_lines_ < left_ ? part_lines_ : left_); }
  void end_step() { fetch(left_); }

 private:
  static constexpr i64 kLine = 64;

  void fetch(i64 lines) {
    left_ -= lines;
    for (; lines > 0 && rows_ > 0; --lines) {
      __builtin_prefetch(*row_ + byte_, 0, 2);
      byte_ += kLine;
      if (byte_ < bytes_) continue;
      byte_ = 0;
      ++row_;
      --rows_;
    }
  }

  const std::byte* const* row_;
  i64 rows_, bytes_, step_lines_, part_lines_ = 0, left_ = 0, byte_ = 0;
};

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

constexpr int keys_of_tile(int rows) {
  return rows == 3 ? 4 : kAccumulators / rows > kPlacedStep ? kPlacedStep : kAccumulators / rows;
}

/// kPlacedStep keys by R rows.
template <class T, class Elements, int R>
void score_step(const T* q, i64 q_stride, const std::byte* const* row, i64 d, T* s, i64 s_stride, Fetching& fetching) {
  constexpr int kKeys = keys_of_tile(R);
  for (int key = 0; key < kPlacedStep; key += kKeys) {
    fetching.part();
    score_tile<T, Elements, R, kKeys>(q, q_stride, row + key, d, s + key, s_stride);
  }
}

template <class T, class Elements, int R>
void score_rows(const T* q, i64 q_stride, i64 count, const std::byte* const* row, i64 d, T* s, i64 s_stride,
                Fetching& fetching) {
  for (; count >= R; count -= R, q += R * q_stride, s += R * s_stride)
    score_step<T, Elements, R>(q, q_stride, row, d, s, s_stride, fetching);
  if constexpr (R > 1) {
    if (count) score_rows<T, Elements, R - 1>(q, q_stride, count, row, d, s, s_stride, fetching);
  }
}

template <class T> void placed_scores(const T* q, i64 q_stride, i64 count, const PlacedRows& keys, T* s, i64 s_stride) {
  with_elements<T>(keys.dtype, [&](auto kind) {
    using Elements = decltype(kind);
    Fetching fetching(keys.later, (keys.count + kPlacedStep - 1) / kPlacedStep);
    i64 key = 0;
    for (; key + kPlacedStep <= keys.count; key += kPlacedStep) {
      fetching.begin_step((count + kPlacedRows - 1) / kPlacedRows * (kPlacedStep / keys_of_tile(kPlacedRows)));
      score_rows<T, Elements, kPlacedRows>(q, q_stride, count, keys.row + key, keys.length, s + key, s_stride,
                                           fetching);
      fetching.end_step();
    }
    if (key == keys.count) return;
    fetching.begin_step(count);
    // The last keys, and one of them again in place of those that a whole step lacks.
    const std::byte* last[kPlacedStep];
    for (i64 j = 0; j < kPlacedStep; ++j) last[j] = keys.row[key + j < keys.count ? key + j : key];
    for (i64 r = 0; r < count; ++r) {
      T sums[kPlacedStep];
      score_rows<T, Elements, 1>(q + r * q_stride, q_stride, 1, last, keys.length, sums, kPlacedStep, fetching);
      for (i64 j = key; j < keys.count; ++j) s[r * s_stride + j] = sums[j - key];
    }
    fetching.end_step();
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
void add_strips(const T* p, i64 p_stride, const std::byte* const* row, i64 keys, i64 column, i64 dv, T* o, i64 o_stride,
                Fetching& fetching) {
  for (; column + Vectors * kLanes<T> <= dv; column += Vectors * kLanes<T>) {
    fetching.part();
    add_strip<T, Elements, R, Vectors>(p, p_stride, row, keys, column, o, o_stride);
  }
  if constexpr (Vectors > 1) {
    if (column < dv) add_strips<T, Elements, R, Vectors / 2>(p, p_stride, row, keys, column, dv, o, o_stride, fetching);
  }
}

constexpr int vectors_of_strip(int rows) {
  return rows == 3 ? kAccumulators / 4 : kAccumulators / rows > 8 ? 8 : kAccumulators / rows;
}

template <class T, class Elements, int R>
void add_rows(const T* p, i64 p_stride, i64 count, const std::byte* const* row, i64 keys, i64 dv, T* o, i64 o_stride,
              Fetching& fetching) {
  constexpr int kVectors = vectors_of_strip(R);
  for (; count >= R; count -= R, p += R * p_stride, o += R * o_stride)
    add_strips<T, Elements, R, kVectors>(p, p_stride, row, keys, 0, dv, o, o_stride, fetching);
  if constexpr (R > 1) {
    if (count) add_rows<T, Elements, R - 1>(p, p_stride, count, row, keys, dv, o, o_stride, fetching);
  }
}

template <class T>
void placed_accumulate(const T* p, i64 p_stride, i64 count, const PlacedRows& values, T* o, i64 o_stride) {
  with_elements<T>(values.dtype, [&](auto kind) {
    using Elements = decltype(kind);
    constexpr i64 kColumnsOfStrip = vectors_of_strip(kPlacedRows) * kLanes<T>;
    const i64 strips = (values.length + kColumnsOfStrip - 1) / kColumnsOfStrip;
    const i64 parts = (count + kPlacedRows - 1) / kPlacedRows * strips;
    Fetching fetching(values.later, (values.count + kPlacedStep - 1) / kPlacedStep);
    for (i64 key = 0; key < values.count; key += kPlacedStep) {
      const i64 keys = values.count - key < kPlacedStep ? values.count - key : kPlacedStep;
      fetching.begin_step(parts);
      add_rows<T, Elements, kPlacedRows>(p + key, p_stride, count, values.row + key, keys, values.length, o, o_stride,
                                         fetching);
      fetching.end_step();
    }
  });
}

template <class T> constexpr DecodeKernels<T> kDecodeKernels{kLanes<T>, placed_scores<T>, placed_accumulate<T>};

}  // namespace
}  // namespace narrows::cpu
