// Few query rows of a kv head, for which packing K and V would cost more than the products.
#pragma once

#include "cpu/query_block.hpp"

#include <array>

namespace narrows::cpu {

/// As QueryBlock, with K and V read where they lie: each row once for all query rows. What the kernels cannot read so, being
/// strided or not of whole vectors, is converted some rows at a time. A DecodeGroup leads it through its steps.
template <class T> class DecodeBlock final : private QueryBlock<T> {
 public:
  DecodeBlock(const ForwardCall<T>& call, const KvHead& head, Range rows, int thread, i64 slot);

  using Base = QueryBlock<T>;
  using Base::finish_rows, Base::keep_partials, Base::keys_of_split;
  Range keys() const { return keys_; }

  void pack_queries();
  /// S of up to kKeysTogether of a block's keys, whose rows of K are given; first: of them in the block. Ends with `weigh`.
  void score(Range block, i64 first, std::span<const std::byte* const> rows, const LaterRows& later);
  /// Weights of the whole block.
  void weigh(Range block);
  /// O += P V, as `score`; rows of V are replaced where a NaN must not be seen.
  void accumulate(Range block, i64 first, std::span<const std::byte*> rows, const LaterRows& later);

 private:
  using Base::call_, Base::head_, Base::keys_, Base::rows_, Base::s_, Base::o_, Base::s_stride_;

  void drop_hidden_values(i64 first_key, const T* p, std::span<const std::byte*> rows);
  PlacedRows placed(const View& view, i64 length, std::span<const std::byte* const> rows, const LaterRows& later);

  /// Where S of a block's first key stands. Columns begin at a whole strip: what is added to a row's sum together must not
  /// depend on where other rows begin.
  T* scores(Range block) const { return s_ + block.begin % call_.kernels.columns; }
  i64 count() const { return static_cast<i64>(rows_.size()); }
  i64 vectors(i64 length) const { return round_up(length, call_.kernels.decode.lanes); }
  bool readable(const View& view, i64 length) const;

  i64 q_stride_;
  T *queries_, *converted_;
  std::array<const std::byte*, kKeysTogether> copies_;
};

extern template class DecodeBlock<float>;
extern template class DecodeBlock<double>;

}  // namespace narrows::cpu
