// Everything between the products: rows of scores and of gradients. Part of tile_kernels.inl.hpp.

namespace narrows::cpu {
namespace {

template <class T> using Bits = typename Traits<T>::Bits;

template <class T> constexpr Vector<T> ascending() {
  Vector<T> lanes = {};
  for (int lane = 0; lane < kLanes<T>; ++lane) lanes[lane] = static_cast<T>(lane);
  return lanes;
}

// Lanes join those `Step` away, for steps of half the lanes down to 1: the order of the sums is the set's own, always the same.
template <int Step, class V, class Join, int... Lane> inline V joined_lanes(V x, Join join, Sequence<Lane...> lanes) {
  x = join(x, __builtin_shufflevector(x, x, (Lane ^ Step)...));
  if constexpr (Step > 1) return joined_lanes<Step / 2>(x, join, lanes);
  return x;
}

template <class T> inline T sum_of_lanes(Vector<T> sum) {
  const auto add = [](Vector<T> a, Vector<T> b) { return a + b; };
  return joined_lanes<kLanes<T> / 2>(sum, add, typename Counted<kLanes<T>>::type{})[0];
}

// ---------------------------------------------------------------------------------------------------------------- logits

template <class T> void logits(T* s, i64 columns, const ScoreRules<T>& given, T position, const T* bias) {
  const ScoreRules<T> rules = given;  // a copy, which the stores cannot change
  Vector<T> offset = position - ascending<T>();
  for (i64 column = 0; column < columns; column += kLanes<T>, offset -= static_cast<T>(kLanes<T>)) {
    const Vector<T> distance = offset < T{0} ? -offset : offset;
    const Vector<T> added = bias ? at(bias + column) : Vector<T>{};
    const Vector<T> x = logit<VectorMath>(at(s + column), rules, distance, added);
    at(s + column) = added == -kInf<T> ? splat(-kInf<T>) : x;
  }
}

template <class T> void hide(T* s, i64 columns, const std::byte* allowed) {
  typedef unsigned char Bytes __attribute__((vector_size(kLanes<T>)));
  i64 column = 0;
  for (; column + kLanes<T> <= columns; column += kLanes<T>) {
    Bytes bytes;
    __builtin_memcpy(&bytes, allowed + column, sizeof bytes);
    const Bits<T> wide = __builtin_convertvector(bytes, Bits<T>);
    store_anywhere<T>(s + column, wide == 0 ? splat(-kInf<T>) : load_anywhere(s + column));
  }
  for (; column < columns; ++column)
    if (allowed[column] == std::byte{0}) s[column] = -kInf<T>;
}

// --------------------------------------------------------------------------------------------------------------- dropout

template <class T> constexpr Bits<T> lane_bits() {
  Bits<T> bits = {};
  for (int lane = 0; lane < kLanes<T>; ++lane) bits[lane] = typename Traits<T>::Bit{1} << lane;
  return bits;
}

struct PhiloxVectors {
  static PhiloxProduct<WordVector> product(u32 factor, WordVector word) {
    const WordVector both = Isa::product(word, WordVector{} + factor);
    return {both >> 32, both & 0xFFFFFFFFu};
  }
};

inline void keep_bits(const DropoutRule& given, i64 batch, i64 head, i64 row, i64 first_key, i64 bytes,
                      std::uint8_t* keep) {
  constexpr i64 kBlocks = kLanes<double>;
  const DropoutRule rule = given;  // a copy, which the stores cannot change
  const u64 first = global_key(rule, first_key), skip = first % 8;
  WordVector lanes = {};
  for (int lane = 0; lane < kBlocks; ++lane) lanes[lane] = static_cast<u64>(lane);
  for (i64 byte = 0; byte < bytes; byte += kBlocks) {
    const u64 group = first / 8 + static_cast<u64>(byte);
    WordVector bits = keep_groups<PhiloxVectors>(rule, batch, head, row, (lanes + group) & 0xFFFFFFFFu);
    if (skip != 0) {
      const WordVector next = keep_groups<PhiloxVectors>(rule, batch, head, row, (lanes + group + 1u) & 0xFFFFFFFFu);
      bits = bits >> static_cast<int>(skip) | next << static_cast<int>(8 - skip);
    }
    const i64 count = bytes - byte < kBlocks ? bytes - byte : kBlocks;
    for (i64 block = 0; block < count; ++block) keep[byte + block] = static_cast<std::uint8_t>(bits[block]);
  }
}

/// x times the factor where the column is kept, else 0; column is a multiple of the lanes.
template <class T> inline Vector<T> dropped(Vector<T> x, const Dropout<T>& dropout, i64 column) {
  const std::uint8_t* const keep = dropout.keep + column / 8;
  const unsigned word = kLanes<T> > 8 ? keep[0] | static_cast<unsigned>(keep[kLanes<T> > 8 ? 1 : 0]) << 8
                                      : static_cast<unsigned>(keep[0]) >> column % 8;
  const Bits<T> bit = lane_bits<T>() & static_cast<typename Traits<T>::Bit>(word);
  return bit == 0 ? Vector<T>{} : x * dropout.factor;
}

// --------------------------------------------------------------------------------------------------------------- softmax

template <class T> T maximum(const T* s, i64 columns) {
  Vector<T> left = at(s), right = at(s + kLanes<T>);
  for (i64 column = kColumns<T>; column < columns; column += kColumns<T>) {
    left = Isa::max(at(s + column), left);
    right = Isa::max(at(s + column + kLanes<T>), right);
  }
  left = Isa::max(left, right);
  left = left == left ? left : splat(-kInf<T>);  // a NaN is no maximum, also where it stands in the first columns
  const auto larger = [](Vector<T> a, Vector<T> b) { return Isa::max(a, b); };
  return joined_lanes<kLanes<T> / 2>(left, larger, typename Counted<kLanes<T>>::type{})[0];
}

// Which of the two sums a column goes to depends on its place in the tile alone. Units and reference come by value: through a
// reference they would be reloaded after every store.
template <class T, bool Near, bool Drops>
T weights_of(T* s, i64 columns, Units<T> units, Reference<T> reference, Dropout<T> dropout) {
  Vector<T> sum[2] = {};
  for (i64 column = 0; column < columns; column += kColumns<T>) {
    Vector<T> p[2];
    for (int half = 0; half < 2; ++half) {
      const i64 at_column = column + half * kLanes<T>;
      const Vector<T> x = at(s + at_column);
      if constexpr (Near)
        p[half] = weight_exp2<T>(VectorMath::fma(x, units.c, -reference.subtrahend));
      else
        p[half] = weight_exp2<T>(weight_exponent<VectorMath>(units, reference, x));
      sum[half] += p[half];
      if constexpr (Drops) p[half] = dropped(p[half], dropout, at_column);
    }
    put_weights(s, column, p[0], p[1]);
  }
  return sum_of_lanes<T>(sum[0] + sum[1]);
}

template <class T>
T weights(T* s, i64 columns, const Units<T>& units, const Reference<T>& reference, const Dropout<T>& dropout) {
  const bool near = reference.base == T{0};
  if (dropout.keep)
    return near ? weights_of<T, true, true>(s, columns, units, reference, dropout)
                : weights_of<T, false, true>(s, columns, units, reference, dropout);
  return near ? weights_of<T, true, false>(s, columns, units, reference, dropout)
              : weights_of<T, false, false>(s, columns, units, reference, dropout);
}

template <class T> void multiply(T* values, i64 count, T factor) {
  for (i64 x = 0; x < count; ++x) values[x] *= factor;
}

// ------------------------------------------------------------------------------------------------------------- gradients

template <class T> void softcap_derivatives(const T* s, i64 columns, const ScoreRules<T>& given, T* out) {
  const ScoreRules<T> rules = given;
  for (i64 column = 0; column < columns; column += kLanes<T>)
    at(out + column) = softcap_derivative(VectorMath::tanh(at(s + column) * rules.scale * rules.inverse_cap));
}

// Near: the reference's factor 1 and base 0, left out, change no bit.
template <class T, bool Near, bool Drops>
void gradients_of(T* s, T* dp, i64 columns, BackwardReference<T> reference, T delta, Dropout<T> dropout) {
  for (i64 column = 0; column < columns; column += kLanes<T>) {
    const Vector<T> x = at(s + column);
    Vector<T> p;
    if constexpr (Near)
      p = exp2_vector<T>(at_most_zero(VectorMath::fma(x, reference.c, -reference.subtrahend)));
    else
      p = exp2_vector<T>(probability_exponent<VectorMath>(reference, x));
    p = x == -kInf<T> ? Vector<T>{} : p;
    at(s + column) = Drops ? dropped(p, dropout, column) : p;
    if (!dp) continue;
    const Vector<T> given = Drops ? dropped(at(dp + column), dropout, column) : at(dp + column);
    const Vector<T> ds = p * (given - delta);
    at(dp + column) = x == -kInf<T> ? Vector<T>{} : ds;
  }
}

template <class T>
void gradients(T* s, T* dp, i64 columns, const BackwardReference<T>& reference, T delta, const Dropout<T>& dropout) {
  const bool near = reference.factor == T{1} && reference.base == T{0};
  if (dropout.keep)
    return near ? gradients_of<T, true, true>(s, dp, columns, reference, delta, dropout)
                : gradients_of<T, false, true>(s, dp, columns, reference, delta, dropout);
  return near ? gradients_of<T, true, false>(s, dp, columns, reference, delta, dropout)
              : gradients_of<T, false, false>(s, dp, columns, reference, delta, dropout);
}

template <class T> T distance_sum(const T* ds, i64 columns, T position) {
  Vector<T> offset = position - ascending<T>();
  Vector<T> sum = {};
  for (i64 column = 0; column < columns; column += kLanes<T>, offset -= static_cast<T>(kLanes<T>))
    sum += (offset < T{0} ? -offset : offset) * at(ds + column);
  return sum_of_lanes<T>(sum);
}

template <class T> void multiply_each(T* values, const T* factors, i64 count) {
  for (i64 x = 0; x < count; x += kLanes<T>) at(values + x) *= at(factors + x);
}

}  // namespace
}  // namespace narrows::cpu
