#include "plan/cpu_backward.hpp"

#include <algorithm>

namespace narrows {
namespace {

constexpr i64 kHeadBytes = i64{192} << 20;  // of packed rows and sums of dQ at once; one head's may be more
// A call with fewer kv heads is cut into about as many tasks. A constant, not the machine's threads: the cut decides the order
// of the sums, and on every machine a call gives the same bits.
constexpr i64 kBackwardTasks = 64;
// Rows of a tile would otherwise lie a power of two apart and fight for the same lines of L1.
constexpr i64 kTileStrideExtra = 16;

i64 partial_bytes(const Problem& problem) {
  return saturating_multiply(rows_of_head(problem), round_up(problem.head_dim, kMostColumns) * item(problem));
}

/// How many kv heads run at once and into how many sums of dQ each is cut. batch_invariant: whatever the batch is, since a row
/// adds exact zeros for keys that it does not see.
void cut(const Problem& problem, Plan& plan) {
  const i64 heads = std::max<i64>(saturating_multiply(problem.batch, problem.kv_heads), 1);
  const i64 chunks = std::max<i64>(ceil_div(problem.max_keys, plan.key_chunk), 1);
  const i64 most = std::max<i64>(kHeadBytes / std::max<i64>(partial_bytes(problem), 1), 4);
  i64 wanted = problem.batch_invariant ? kBackwardTasks : std::min(ceil_div(kBackwardTasks, heads), most);
  if (problem.num_splits && !problem.batch_invariant) wanted = problem.num_splits;
  plan.partials = std::min(wanted, chunks);
  const i64 sums = problem.wants_dq ? saturating_multiply(partial_bytes(problem), plan.partials) : 0;
  const i64 blocks = saturating_multiply(query_blocks_of_head(problem, plan), query_block_scratch(problem, plan).bytes);
  plan.heads_at_once = std::clamp<i64>(kHeadBytes / std::max<i64>(saturating_add(sums, blocks), 1), 1,
                                       std::min(heads, most_heads_at_once(plan)));
}

}  // namespace

i64 backward_tile_stride(i64 key_block) { return key_block + kTileStrideExtra; }

QueryBlockScratch query_block_scratch(const Problem& problem, const Plan& plan) {
  QueryBlockScratch scratch;
  const auto take = [&](i64& start, i64 count, i64 size) {
    start = scratch.bytes;
    scratch.bytes += aligned_bytes(count * size);
  };
  const i64 packed = packed_item(plan), pointer = static_cast<i64>(sizeof(void*));
  const i64 d = round_up(problem.head_dim, kMostColumns), dv = round_up(problem.value_dim, kMostColumns);
  const i64 rows = round_up(std::min(plan.query_block, rows_of_head(problem)), kMostColumns) + kMostPanelRows;
  take(scratch.rows, rows, kGradientRowBytes);
  take(scratch.query_pointers, rows, pointer);
  take(scratch.dout_pointers, rows, pointer);
  take(scratch.query_panels, rows * d, packed);
  take(scratch.dout_panels, rows * dv, packed);
  take(scratch.query_strips, rows * d, packed);
  take(scratch.dout_strips, rows * dv, packed);
  return scratch;
}

i64 query_blocks_of_head(const Problem& problem, const Plan& plan) {
  return ceil_div(rows_of_head(problem), plan.query_block);
}

BackwardThreadScratch backward_thread_scratch(const Problem& problem, const Plan& plan) {
  BackwardThreadScratch scratch;
  const auto take = [&](i64& start, i64 count, i64 size) {
    start = scratch.bytes;
    scratch.bytes += aligned_bytes(count * size);
  };
  const i64 size = item(problem), packed = packed_item(plan), pointer = static_cast<i64>(sizeof(void*));
  const i64 d = round_up(problem.head_dim, kMostColumns), dv = round_up(problem.value_dim, kMostColumns);
  const i64 rows = round_up(std::min(plan.query_block, rows_of_head(problem)), kMostColumns) + kMostPanelRows;
  const i64 block = round_up(plan.key_block, kMostColumns), row = backward_tile_stride(block);
  const i64 keys = std::min(plan.key_chunk + block, round_up(problem.max_keys, kMostColumns));
  take(scratch.terms, 2 * dv, size);
  take(scratch.query_block, problem.wants_dbias ? query_block_scratch(problem, plan).bytes : 0, 1);
  take(scratch.tiles, ceil_div(keys, plan.key_block), kKeyTileBytes);
  take(scratch.key_pointers, block, pointer);
  take(scratch.value_pointers, block, pointer);
  take(scratch.keys, keys * (2 * d + dv), packed);
  take(scratch.probabilities, rows * row, size);
  take(scratch.gradients, rows * row, size);
  const bool narrows = plan.operand != accumulator(problem.dtype);
  take(scratch.transposed_probabilities, narrows ? rows * row : 0, packed);
  take(scratch.transposed_gradients, narrows ? rows * row : 0, packed);
  take(scratch.bias, problem.bias.given ? row : 0, size);
  take(scratch.keep, problem.rules.dropout > 0 ? row / 8 : 0, 1);
  take(scratch.allowed, problem.mask.given ? row : 0, 1);
  take(scratch.derivative, problem.rules.softcap != 0 ? row : 0, size);
  take(scratch.dk, problem.wants_dk ? keys * d : 0, size);
  take(scratch.dv, problem.wants_dv ? keys * dv : 0, size);
  take(scratch.dbias, problem.wants_dbias ? kBiasBlocks * plan.query_block * block : 0, size);
  return scratch;
}

Regions backward_scratch(const Problem& problem, const Plan& plan) {
  const i64 sums = saturating_multiply(plan.heads_at_once * plan.partials, partial_bytes(problem));
  const i64 slopes = saturating_multiply(saturating_multiply(problem.batch, problem.heads),
                                         plan.partials * static_cast<i64>(sizeof(double)));
  const i64 blocks = saturating_multiply(query_blocks_of_head(problem, plan), query_block_scratch(problem, plan).bytes);
  return {{"packed Q and dO", aligned_bytes(saturating_multiply(plan.heads_at_once, blocks))},
          {"progress of heads", aligned_bytes(plan.heads_at_once * kHeadProgressBytes)},
          {"sums of dQ", problem.wants_dq ? aligned_bytes(sums) : 0},
          {"sums of dslopes", problem.wants_dslopes ? aligned_bytes(slopes) : 0},
          {"tiles", plan.threads * backward_thread_scratch(problem, plan).bytes}};
}

void plan_cpu_backward(const Problem& problem, Plan& plan) {
  cut(problem, plan);
  plan.workspace = backward_scratch(problem, plan);
}

}  // namespace narrows
