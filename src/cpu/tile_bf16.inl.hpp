// Operands in bf16, two to a dword: packing, and weights as the products read them. Scores and sums are fp32. Comes after
// tile_transpose.inl.hpp and before the products of tile_pairs.inl.hpp or tile_registers.inl.hpp.
//
// Key strips are [keys / columns][d / 2][columns] dwords, each of two neighbours along d; value strips are
// [dv / columns][keys / 2][columns] dwords, each of one column of two neighbouring keys. The first is in the low half.

namespace narrows::cpu {
namespace {

template <class T> constexpr DType kOperand = DType::bf16;
template <class T> constexpr DecodeKernels<T> kDecodeKernels{};  // plans read in place with weights of the sums' type
constexpr int kDepth = Isa::kDepth;
constexpr int kUnit = kVectorBytes / 2;  // elements of a vector: a strip's columns
static_assert(kUnit == kColumns<float> && kUnit % kDepth == 0);

typedef int Pair __attribute__((may_alias));
typedef unsigned short Bfloat __attribute__((may_alias));
typedef unsigned short BfloatVector __attribute__((vector_size(kVectorBytes), may_alias));

inline i64 whole(i64 count, i64 unit) { return (count + unit - 1) / unit * unit; }

inline IntVector& bits_at(Packed* p) { return *reinterpret_cast<IntVector*>(p); }
inline const IntVector& bits_at(const Packed* p) { return *reinterpret_cast<const IntVector*>(p); }

// Pairs of element FirstOfA + x of a and FirstOfB + x of b.
template <int FirstOfA, int FirstOfB, int... Lane>
inline IntVector paired_lanes(IntVector a, IntVector b, Sequence<Lane...>) {
  return (IntVector)__builtin_shufflevector((BfloatVector)a, (BfloatVector)b,
                                            (Lane % 2 ? kUnit + FirstOfB + Lane / 2 : FirstOfA + Lane / 2)...);
}
template <int FirstOfA, int FirstOfB> inline IntVector paired(IntVector a, IntVector b) {
  return paired_lanes<FirstOfA, FirstOfB>(a, b, typename Counted<kUnit>::type{});
}

// --------------------------------------------------------------------------------------------------------------- packing

// `count` <= kUnit elements of a row, rounded to nearest even, then zeros. Only rows of bf16 and, rotated, of fp32 come here.
inline IntVector read_unit(const Rows& source, const std::byte* p, i64 count, float sign) {
  if (!p) return IntVector{};
  const bool consecutive = source.stride == 2;
  if (source.dtype != DType::bf16 || sign != 1.f) {
    alignas(kVectorBytes) float values[kUnit] = {};
    convert(p, source.stride, source.dtype, count, values);
    return Isa::to_bfloats(at(values) * sign, at(values + kLanes<float>) * sign);
  }
  if (count == kUnit && consecutive) {
    IntVector values;
    __builtin_memcpy(&values, p, sizeof values);
    return values;
  }
  alignas(kVectorBytes) Bfloat values[kUnit] = {};
  if (consecutive)
    __builtin_memcpy(values, p, static_cast<std::size_t>(count) * sizeof(Bfloat));
  else
    for (i64 x = 0; x < count; ++x) __builtin_memcpy(values + x, p + x * source.stride, sizeof(Bfloat));
  return *reinterpret_cast<const IntVector*>(values);
}

inline const std::byte* row_at(const Rows& source, i64 row, i64 from) {
  const std::byte* const p = row < source.count ? source.row[row] : nullptr;
  return p ? p + from * source.stride : nullptr;
}

// In whole units.
inline void read_row(const Rows& source, i64 row, i64 from, i64 count, float sign, Packed* out) {
  for (i64 x = 0; x < count; x += kUnit)
    bits_at(out + x * i64{sizeof(Bfloat)}) =
        read_unit(source, row_at(source, row, from + x), count - x < kUnit ? count - x : i64{kUnit}, sign);
}

// rows x length to dwords [length / 2][Width].
template <int Width> void transpose_pairs(const Rows& source, i64 first, float sign, float* out) {
  constexpr i64 kElements = 2 * kPiece;
  alignas(kVectorBytes) float piece[Width][kPiece];
  const i64 length = whole(source.length, kDepth);
  for (i64 from = 0; from < length; from += kElements) {
    const i64 given = source.length - from < kElements ? source.length - from : kElements;
    const i64 pairs = (length - from < kElements ? length - from : kElements) / 2;
    for (int row = 0; row < Width; ++row) {
      if (from == 0) prefetch_row(source, first + row + Width);
      read_row(source, first + row, from, given, sign, reinterpret_cast<Packed*>(piece[row]));
    }
    transpose_piece<Width>(piece[0], pairs, out + from / 2 * Width);
  }
}

template <class T> void pack_keys(const Rows& source, Packed* strips) {
  const i64 length = whole(source.length, kDepth);
  for (i64 first = 0; first < source.count; first += kColumns<T>)
    transpose_pairs<kColumns<T>>(source, first, T{1}, reinterpret_cast<float*>(strips) + first / 2 * length);
}

template <class T> void pack_values(const Rows& source, Packed* strips) {
  const i64 keys = whole(source.count, kColumns<T>);
  constexpr i64 kAhead = 16;
  for (i64 key = 0; key < keys; key += 2) {
    prefetch_row(source, key + kAhead);
    prefetch_row(source, key + kAhead + 1);
    Packed* strip = strips + key * kVectorBytes;
    for (i64 from = 0; from < source.length; from += kColumns<T>, strip += keys * kVectorBytes) {
      const i64 count = source.length - from < kColumns<T> ? source.length - from : i64{kColumns<T>};
      const IntVector even = read_unit(source, row_at(source, key, from), count, T{1});
      const IntVector odd = read_unit(source, row_at(source, key + 1, from), count, T{1});
      bits_at(strip) = paired<0, 0>(even, odd);
      bits_at(strip + kVectorBytes) = paired<kUnit / 2, kUnit / 2>(even, odd);
    }
  }
}

template <class T> bool all_finite(const Packed* values, i64 count) {
  typedef short Mask __attribute__((vector_size(kVectorBytes)));
  Mask found = {};
  for (i64 x = 0; x < count; x += kUnit, values += kVectorBytes)
    found |= (Mask)(((BfloatVector)bits_at(values) & 0x7f80) == 0x7f80);
  int any = 0;
  for (int lane = 0; lane < kUnit; ++lane) any |= found[lane];
  return any == 0;
}

// --------------------------------------------------------------------------------------------------------------- weights

/// 2^x for weights that become bf16: 1 + f * (...) on [-1/2, 1/2], minimax in relative error (2^-18.4) with the constant term
/// held at 1. Not shorter: the sum of the weights is the LSE's, which keeps 2^-16.
template <class T> inline Vector<T> weight_exp2(Vector<T> x) {
  constexpr float kTerms[] = {0.69312419342071848543f, 0.24024098611670645985f, 0.055906424591413040033f,
                              0.0095828530290460023336f};
  const auto exponent = Isa::template split<T>(x);
  const Vector<T> f = x - exponent.whole;
  Vector<T> series = splat(kTerms[3]);
  for (int term = 2; term >= 0; --term) series = Isa::fma(series, f, splat(kTerms[term]));
  return Isa::template scaled<T>(Isa::fma(series, f, splat(T{1})), exponent, x);
}

template <class T> inline void put_weights(T* s, i64 column, Vector<T> left, Vector<T> right) {
  bits_at(reinterpret_cast<Packed*>(s + column / 2)) = Isa::to_bfloats(left, right);
}

template <class T> void narrow(T* row, i64 columns) {
  for (i64 column = 0; column < columns; column += kColumns<T>)
    put_weights(row, column, at(row + column), at(row + column + kLanes<T>));
}

// Column `column` and the next ones of rows that lie at p and p + ld, a dword each.
inline IntVector paired_rows(const float* p, i64 ld, i64 column) {
  const IntVector both = Isa::to_bfloats(at(p + column), at(p + ld + column));
  return paired<0, kUnit / 2>(both, both);
}

}  // namespace
}  // namespace narrows::cpu
