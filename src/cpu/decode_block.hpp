// One task of decoding: few query rows of a kv head, for which packing K and V would cost more than the products.
#pragma once

#include "cpu/query_block.hpp"

#include <array>

namespace narrows::cpu {

/// As QueryBlock, with K and V read where they lie: each row once for all query rows. What the kernels cannot read so, being
/// strided or not of whole vectors, is converted some rows at a time.
template <class T> class DecodeBlock final : public QueryBlock<T> {
 public:
  DecodeBlock(const ForwardCall<T>& call, const KvHead& head, Range rows, int thread);

 private:
  using Base = QueryBlock<T>;
  using Base::call_, Base::head_, Base::rows_, Base::s_, Base::o_, Base::s_stride_;

  void pack_queries() override;
  void attend(Range keys) override;
  void attend_block(Range keys, Range next);
  void find_rows(Range keys, Range next);
  void score(i64 keys, T* s);
  void accumulate(i64 keys, const T* p);
  void drop_hidden_values(Range keys, const T* p);
  PlacedRows converted(const std::byte* const* rows, const View& view, i64 count, i64 length);

  i64 count() const { return static_cast<i64>(rows_.size()); }
  i64 vectors(i64 length) const { return round_up(length, call_.kernels.decode.lanes); }
  bool readable(const View& view, i64 length) const;

  i64 q_stride_;
  T *queries_, *converted_;
  std::array<const std::byte*, kConvertedRows + kRowsBeyond> copies_;
  const std::byte **key_rows_, **value_rows_;  // of a block, and what is read after it
};

extern template class DecodeBlock<float>;
extern template class DecodeBlock<double>;

}  // namespace narrows::cpu
