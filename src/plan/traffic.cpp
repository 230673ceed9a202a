#include "plan/traffic.hpp"

#include "shared/tile_order.h"

#include <algorithm>

namespace narrows {
namespace {

i64 keys_of_sequence(const Mask& mask, const Sequence& sequence, i64 query_block) {
  i64 keys = 0;
  for (i64 first = 0; first < sequence.queries; first += query_block) {
    const Range rows{first, std::min(first + query_block, sequence.queries)};
    keys += length(key_range(mask, rows, sequence.shift, sequence.keys));
  }
  return keys;
}

/// Keys that query blocks of one head read, all blocks of all sequences.
i64 keys_of_blocks(const Call& call, i64 query_block) {
  const Problem& problem = call.problem;
  const Mask& mask = problem.rules.mask;
  if (!problem.lengths_on_device)
    return saturating_multiply(
        problem.batch, problem.batch ? keys_of_sequence(mask, sequence(problem, call.buffers, 0), query_block) : 0);
  i64 widest = std::min(problem.max_keys, saturating_add(saturating_add(mask.left, mask.right), query_block));
  if (mask.chunk) widest = std::min(widest, saturating_add(saturating_multiply(2, mask.chunk - 1), query_block));
  const bool varlen = problem.query_form == QueryForm::varlen;
  const i64 blocks =
      varlen ? block_count(problem.query_rows, static_cast<i32>(problem.batch), static_cast<i32>(query_block))
             : saturating_multiply(problem.batch, ceil_div<i64>(problem.max_queries, query_block));
  return saturating_multiply(blocks, widest);
}

}  // namespace

i64 l2_bytes(const Call& call, const Plan& plan) {
  const Problem& problem = call.problem;
  if (problem.device.kind != DeviceKind::cuda || problem.operation != Operation::forward || plan.decodes) return 0;
  const i64 columns = problem.head_dim + problem.value_dim;
  const i64 item = static_cast<i64>(item_size(problem.dtype));
  const i64 rows = problem.query_form == QueryForm::varlen ? problem.query_rows
                                                           : saturating_multiply(problem.batch, problem.query_rows);
  const i64 elements =
      saturating_multiply(saturating_add(rows, keys_of_blocks(call, plan.query_block)), columns);  // q and o; k and v
  const i64 lse =
      problem.wants_lse ? saturating_multiply(rows, static_cast<i64>(item_size(accumulator(problem.dtype)))) : 0;
  return saturating_multiply(problem.heads, saturating_add(saturating_multiply(elements, item), lse));
}

}  // namespace narrows
