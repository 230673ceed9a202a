// One task of the blocked forward: some query rows of a kv head against all the keys that they see.
#pragma once

#include "cpu/forward_call.hpp"
#include "cpu/scratch.hpp"

#include <vector>

namespace narrows::cpu {

/// The scratch of one thread, and what is done in it.
template <class T> class QueryBlock {
 public:
  explicit QueryBlock(const ForwardCall<T>& call);

  /// Writes O and LSE of rows [rows.begin, rows.end) of a kv head, numbered as KvHead says; at most call.query_block.
  void run(const KvHead& head, T* packed, Range rows);

 private:
  struct Row {
    i64 i, h;       // query row of the sequence, query head
    Range visible;  // keys, before mask and bias
    ScoreRules<T> rules;
    Reference<T> reference;  // of the softmax so far
    T sum;                   // of weights relative to it
  };

  void load(Range rows);
  void attend(i64 first_row, int count, const PackedTile<T>& tile, i64 first_key);
  void make_logits(const Row& row, T* s, Range keys);
  void add_weights(Row& row, T* s, i64 columns, T* o);
  void finish(const Row& row, const T* o);

  const ForwardCall<T>& call_;
  const KvHead* head_ = nullptr;
  i64 panel_rows_;  // of a register tile
  i64 s_stride_;
  std::vector<Row> rows_;
  std::vector<const std::byte*> sources_;
  Scratch<T> q_, s_, o_, bias_;
};

extern template class QueryBlock<float>;
extern template class QueryBlock<double>;

}  // namespace narrows::cpu
