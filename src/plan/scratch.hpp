// Sizes that the CPU's forward and backward scratch are made of.
#pragma once

#include "plan/plan.hpp"

namespace narrows {

// Upper bounds for every instruction set's register tile, so that a plan needs none.
inline constexpr i64 kMostPanelRows = 32, kMostColumns = 32;
// And for how far a head is.
inline constexpr i64 kHeadProgressBytes = 128;

constexpr i64 round_up(i64 size, i64 unit) { return saturating_multiply(ceil_div(size, unit), unit); }

constexpr i64 aligned_bytes(i64 bytes) {
  return bytes > kMaxCount - kScratchAlignment ? kMaxCount : round_up(bytes, kScratchAlignment);
}

/// Bytes of a score, of a sum, and of a packed element.
inline i64 item(const Problem& problem) { return static_cast<i64>(item_size(accumulator(problem.dtype))); }
inline i64 packed_item(const Plan& plan) { return static_cast<i64>(item_size(plan.operand)); }

/// How many heads lie in scratch together: enough that threads seldom wait for the last of them, few enough that the caches
/// see the same scratch again (3% of a call on one thread).
inline i64 most_heads_at_once(const Plan& plan) { return plan.threads == 1 ? 1 : 4 * i64{plan.threads}; }

/// Query rows that share a kv head in the longest sequence.
inline i64 rows_of_head(const Problem& problem) { return saturating_multiply(problem.max_queries, problem.group()); }

}  // namespace narrows
