// What the parts of the blocked backward share.
#pragma once

#include "cpu/kernel_call.hpp"
#include "plan/cpu_backward.hpp"

namespace narrows::cpu {

template <class T> struct BackwardCall : KernelCall<T> {
  i64 key_chunk = 0;    // keys whose dK and dV one thread holds, a multiple of key_block
  i64 partials = 0;     // sums of dQ of one kv head, made side by side
  i64 query_width = 0;  // d in whole strips

  T* query_sums = nullptr;            // of dQ: [head at once][partial][row of the longest sequence][query_width]
  double* slope_sums = nullptr;       // of |p - j| dS: [batch][kv head][partial][head of the group]
  std::byte* query_blocks = nullptr;  // [head at once][block of the longest sequence][query_block_layout.bytes]
  i64 blocks_of_head = 0;
  std::byte* progress = nullptr;  // of the heads at once
  QueryBlockScratch query_block_layout{};
  std::byte* threads = nullptr;
  BackwardThreadScratch layout{};  // of each thread's part

  template <class Part> Part* scratch(int thread, i64 start) const {
    return reinterpret_cast<Part*>(threads + thread * layout.bytes + start);
  }
};

/// Query heads of one sequence that share a kv head. Their rows are numbered i * (how many heads) + (head - the first).
struct QueryHeads {
  i64 batch = 0;
  i64 kv_head = 0;
  Range heads;
  Sequence sequence;

  i64 width() const { return heads.end - heads.begin; }
  i64 rows() const { return sequence.queries * width(); }
  /// Numbers of the rows i of `queries`.
  Range numbers(Range queries) const { return {queries.begin * width(), queries.end * width()}; }
};

template <class T> QueryHeads query_heads(const BackwardCall<T>& call, i64 batch, i64 kv_head) {
  const i64 group = call.problem.group();
  return {batch, kv_head, {kv_head * group, (kv_head + 1) * group}, sequence(call.problem, call.buffers, batch)};
}

template <class T> struct RowTerms {
  T lse = -kInfinity<T>;
  T delta = T{0};  // D - dLSE, where D = rowsum(dO * O)
};

/// `scratch`: room for two rows of value_width.
template <class T>
RowTerms<T> row_terms(const BackwardCall<T>& call, const QueryHeads& heads, i64 h, i64 i, T* scratch);

}  // namespace narrows::cpu
