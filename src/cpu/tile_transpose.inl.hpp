// Square transpositions in registers, and the packing that is made of them. Part of tile_kernels.inl.hpp.

namespace narrows::cpu {
namespace {

template <int... Numbers> struct Sequence {};
template <int Count, int... Numbers> struct Counted : Counted<Count - 1, Count - 1, Numbers...> {};
template <int... Numbers> struct Counted<0, Numbers...> { using type = Sequence<Numbers...>; };

// Exchanges, of two rows that are `Step` apart, the lanes that do not belong to the row: those with the bit Step set in the
// upper row, the others in the lower one.
template <int Step, class V, int... Lane> inline void exchange(V& upper, V& lower, Sequence<Lane...>) {
  constexpr int kCount = static_cast<int>(sizeof...(Lane));
  const V both = __builtin_shufflevector(upper, lower, ((Lane & Step) ? kCount + Lane - Step : Lane)...);
  lower = __builtin_shufflevector(upper, lower, ((Lane & Step) ? kCount + Lane : Lane + Step)...);
  upper = both;
}

template <int Step, class V, int Count> inline void transpose_square(V (&rows)[Count]) {
  if constexpr (Step < Count) {
#pragma GCC unroll 16
    for (int row = 0; row < Count; ++row)
      if (!(row & Step)) exchange<Step>(rows[row], rows[row + Step], typename Counted<Count>::type{});
    transpose_square<2 * Step>(rows);
  }
}

constexpr i64 kPiece = 64;  // elements of a row that stay in L1 between conversion and transposition

// `Width` rows of E, kPiece apart, of which `count` <= lanes elements are taken, to [count][Width]. Where Width is no multiple
// of the lanes the last vector of a column runs over its end: into the next column, which is written later, or beyond the last.
template <int Width, int First, class T> inline void transpose_block(const T* piece, i64 count, T* out) {
  Vector<T> block[kLanes<T>];
#pragma GCC unroll 16
  for (int row = 0; row < kLanes<T>; ++row)
    block[row] = First + row < Width ? at(piece + (First + row) * kPiece) : Vector<T>{};
  transpose_square<1>(block);
  if (count == kLanes<T>) {
#pragma GCC unroll 16
    for (int column = 0; column < kLanes<T>; ++column) store_anywhere<T>(out + column * Width + First, block[column]);
  } else {
    for (i64 column = 0; column < count; ++column) store_anywhere<T>(out + column * Width + First, block[column]);
  }
  if constexpr (First > 0) transpose_block<Width, First - kLanes<T>>(piece, count, out);
}

template <int Width, class T> void transpose_piece(const T* piece, i64 count, T* out) {
  constexpr int kLast = (Width - 1) / kLanes<T> * kLanes<T>;
  for (i64 x = 0; x < count; x += kLanes<T>)
    transpose_block<Width, kLast>(piece + x, count - x < kLanes<T> ? count - x : i64{kLanes<T>}, out + x * Width);
}

}  // namespace
}  // namespace narrows::cpu
