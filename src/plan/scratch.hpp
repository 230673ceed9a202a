// Sizes that the CPU's forward and backward scratch are made of.
#pragma once

#include "plan/plan.hpp"

namespace narrows {

// Upper bounds for every instruction set's register tile, so that a plan needs none.
inline constexpr i64 kMostPanelRows = 32, kMostColumns = 32;

constexpr i64 round_up(i64 size, i64 unit) { return saturating_multiply(ceil_div(size, unit), unit); }

constexpr i64 aligned_bytes(i64 bytes) {
  return bytes > kMaxCount - kScratchAlignment ? kMaxCount : round_up(bytes, kScratchAlignment);
}

/// Bytes of a score, of a sum, and of a packed element.
inline i64 item(const Problem& problem) { return static_cast<i64>(item_size(accumulator(problem.dtype))); }
inline i64 packed_item(const Plan& plan) { return static_cast<i64>(item_size(plan.operand)); }

/// Query rows that share a kv head in the longest sequence.
inline i64 rows_of_head(const Problem& problem) { return saturating_multiply(problem.max_queries, problem.group()); }

}  // namespace narrows
