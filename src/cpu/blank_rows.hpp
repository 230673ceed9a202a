// Rows of a (b, s, h, d) result that belong to no sequence or lie beyond its used rows.
#pragma once

#include "core/problem.hpp"

namespace narrows::cpu {

/// Gap number `gap` of `rows` rows: dense, in [0, batch), what follows the used rows of a batch row; varlen, in [0, batch],
/// what lies between a sequence and the one before it, or the tensor's end. used(b): the rows of sequence b.
template <class Used> Range blank_rows(bool varlen, i64 batch, i64 rows, i64 gap, Used used) {
  if (!varlen) return {used(gap).end, rows};
  return {gap > 0 ? used(gap - 1).end : 0, gap < batch ? used(gap).begin : rows};
}

}  // namespace narrows::cpu
