// One task of the blocked forward: some query rows of a kv head against all the keys that they see, or one split of them.
#pragma once

#include "cpu/forward_call.hpp"

#include <span>

namespace narrows::cpu {

/// Some rows of a kv head, numbered as KvHead says, at most call.query_block; in the scratch of one thread. Keys and values
/// are packed first; DecodeBlock does without. `slot`: its place among the blocks that the thread has at once.
template <class T> class QueryBlock {
 public:
  QueryBlock(const ForwardCall<T>& call, const KvHead& head, Range rows, int thread, i64 slot = 0);

  /// O and LSE from all the keys.
  void run();
  /// The partial results of one split.
  void run_split(i64 split);
  /// O and LSE from the partial results of the splits.
  void merge_splits();

 protected:
  struct Row {
    ScoreRow place;
    ScoreRules<T> rules;
    RunningSum<T> sum;  // of weights so far
  };
  static_assert(sizeof(Row) <= kQueryRowBytes);

  Range keys_of_split(i64 split) const {
    return intersect(keys_, {split * call_.split_keys, (split + 1) * call_.split_keys});
  }
  void finish_rows();
  void keep_partials(i64 split);

  /// Leaves pointers_ at the rows of Q.
  void find_queries();
  /// Of those, some that are a panel or less, rotated where the call says so; until the next call.
  Rows query_rows(i64 first_row, i64 count);
  void add_weights(Row& row, T* s, Range keys, T* o);
  T* output(i64 row) const { return o_ + row * call_.value_width; }
  std::byte* target(const Row& row) const {
    return call_.buffers.o.at(head_.batch, head_.sequence.first_query + row.place.i, row.place.h);
  }

  const ForwardCall<T>& call_;
  const KvHead& head_;
  int thread_;
  i64 slot_;
  i64 panel_rows_;  // of a register tile
  i64 s_stride_;
  Packed* q_;
  T *s_, *o_, *rotated_;
  RowScratch<T> row_scratch_;
  std::uint8_t* keep_;
  const std::byte** pointers_;
  Range numbers_;
  std::span<Row> rows_;
  Range keys_;  // that the rows see

 private:
  /// The call's scratch for this slot.
  template <class Part> Part* scratch(i64 start) const {
    return call_.template scratch<Part>(thread_, start + slot_ * call_.layout.slot_bytes);
  }
  std::span<Row> load_rows(Range rows);
  /// Of `keys`, from the first to the last that one of the rows sees.
  Range seen_by(std::span<const Row> rows, Range keys) const;
  /// Q as the products read it, and an O of zeros.
  void pack_queries();
  /// Adds keys, which begin and end where tiles or the rows' hull do.
  void attend(Range keys);
  void rotate_queries(i64 first_row, i64 count);
  void attend_tile(i64 first_row, i64 count, const PackedTile& tile, i64 first_key);
  void finish(const Row& row, const T* o);
  T write_lse(const Row& row);
};

extern template class QueryBlock<float>;
extern template class QueryBlock<double>;

}  // namespace narrows::cpu
