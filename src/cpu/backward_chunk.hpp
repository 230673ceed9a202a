// One task of the blocked backward: a share of a kv head's keys against all the query rows that see them.
#pragma once

#include "cpu/backward_tile.hpp"

namespace narrows::cpu {

template <class T> class KeyChunk {
 public:
  /// In the thread's scratch.
  KeyChunk(const BackwardCall<T>& call, int thread);

  /// Chunks number `partial`, partial + call.partials, ... of the head's keys, against its packed query blocks. Writes their dK and dV; dq, row-major
  /// (heads.rows(), query_width), and slopes (one a head) become these keys' sums of dS K and of |p - j| dS. Either may be
  /// null.
  void run(const QueryHeads& heads, std::byte* query_blocks, i64 partial, T* dq, double* slopes);

 private:
  void add_block(const QueryRows<T>& rows, T* dq, double* slopes);
  void add_to_keys(const QueryRows<T>& rows, const KeyTile& tile, i64 first_key);
  void add_to_queries(const QueryRows<T>& rows, const KeyTile& tile, T* dq);
  void store(const QueryHeads& heads, Range keys) const;

  const BackwardCall<T>& call_;
  KeyTiles<T> keys_;
  GradientTile<T> tile_;
  T *dk_, *dv_;  // sums of the chunk's keys; null where they are not wanted
};

/// Whether the walk over all tiles computes dS, or P alone for dV.
inline bool wants_score_gradients(const Problem& problem) {
  return problem.wants_dq || problem.wants_dk || problem.wants_dslopes;
}

extern template class KeyChunk<float>;
extern template class KeyChunk<double>;

}  // namespace narrows::cpu
