// Query rows of a block as the backward tiles need them: Q and dO in panels and in strips, and each row's terms.
#pragma once

#include "cpu/backward_call.hpp"

#include <span>

namespace narrows::cpu {

template <class T> struct GradientRow {
  i64 i, h;
  Range visible;  // keys, before mask and bias; none where the LSE says that no key weighs
  ScoreRules<T> rules;
  BackwardReference<T> reference;
  T delta;
};
static_assert(sizeof(GradientRow<double>) <= kGradientRowBytes);

template <class T> class QueryRows {
 public:
  /// `block`: call.query_block_layout.bytes.
  QueryRows(const BackwardCall<T>& call, std::byte* block);

  /// Packs rows with these numbers into the block; at most call.query_block. A row that sees no key is read as zeros. terms:
  /// room for two rows of value_width.
  void load(const QueryHeads& heads, Range numbers, T* terms);
  /// What an earlier load of the same rows left in the block.
  void refer(const QueryHeads& heads, Range numbers);

  const QueryHeads& heads() const { return heads_; }
  std::span<const GradientRow<T>> rows() const { return {rows_, static_cast<std::size_t>(count())}; }
  i64 count() const { return numbers_.end - numbers_.begin; }
  Range numbers() const { return numbers_; }

  /// Panels of the rows from first_row on, a whole number of panels from the start.
  const Packed* queries(i64 first_row) const { return q_panels_ + call_.packed(first_row * call_.query_depth); }
  const Packed* gradients(i64 first_row) const { return dout_panels_ + call_.packed(first_row * call_.value_depth); }
  /// Value strips from first_row on, a multiple of the depth; the strips are strip_stride() elements apart.
  const Packed* query_strips(i64 first_row) const {
    return q_strips_ + call_.packed(first_row * call_.kernels.columns);
  }
  const Packed* gradient_strips(i64 first_row) const {
    return dout_strips_ + call_.packed(first_row * call_.kernels.columns);
  }
  i64 strip_stride() const;

 private:
  void ask_for(i64 number) const;
  void pack();
  bool drop_hidden_rows();

  const BackwardCall<T>& call_;
  QueryHeads heads_;
  Range numbers_;
  GradientRow<T>* rows_;
  const std::byte **q_, **dout_;  // rows; null where one sees no key
  Packed *q_panels_, *dout_panels_, *q_strips_, *dout_strips_;
};

extern template class QueryRows<float>;
extern template class QueryRows<double>;

}  // namespace narrows::cpu
