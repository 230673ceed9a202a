#include "plan/cpu_forward.hpp"

#include <algorithm>

namespace narrows {
namespace {

constexpr i64 kPackedBytes =
    i64{64} << 20;                 // of K and V copies, or of partial results, at once: one head's may be more
constexpr i64 kMostHeads = 65536;  // described in scratch at once
// A call with fewer (sequence, kv head) pairs splits its keys into about as many tasks. A constant, not the machine's
// threads: on every machine a call gives the same bits.
constexpr i64 kTasksOfCall = 64;
// Reading in place, tasks are cheaper, and small ones let the kv heads of the same keys, which may lie side by side, be read
// soon after each other: 1.4 to 1.7 times as fast on a Zen 3 core with rows of all heads 4 KiB apart.
constexpr i64 kTasksInPlace = 1024;
// Of a key, read together.
constexpr i64 kBytesTogether = 4096;
// Fewer leave threads without work at the end.
constexpr i64 kTasksOfThread = 4;
// A panel's rows would otherwise lie a power of two apart and fight for the same lines of L1.
constexpr i64 kScoreStrideExtra = 16;

i64 value_width(const Problem& problem) { return round_up(problem.value_dim, kMostColumns); }
i64 key_block(const Plan& plan) { return round_up(plan.key_block, kMostColumns); }
i64 packed_row(const Problem& problem, const Plan& plan) {
  return (round_up(problem.head_dim, plan.depth) + value_width(problem)) * packed_item(plan);
}

i64 packed_bytes(const Problem& problem, const Plan& plan) {
  return saturating_multiply(round_up(problem.max_keys, kMostColumns), packed_row(problem, plan));
}

i64 partial_output_bytes(const Problem& problem, i64 splits) {
  return saturating_multiply(saturating_multiply(rows_of_head(problem), splits), value_width(problem) * item(problem));
}

/// Heads whose rows lie side by side are read together: a task then reads memory in its order. As long as there are some tasks
/// for each thread.
i64 heads_together(const Problem& problem, const Plan& plan) {
  if (!plan.reads_in_place || !problem.k.heads_adjoin || !problem.v.heads_adjoin) return 1;
  const i64 row = std::max(problem.head_dim, problem.value_dim) * static_cast<i64>(item_size(problem.dtype));
  const i64 most = std::min({kMostHeadsTogether, problem.kv_heads, std::max<i64>(kBytesTogether / row, 1)});
  const i64 tasks =
      saturating_multiply(saturating_multiply(problem.batch, problem.kv_heads), forward_splits(problem, plan));
  const i64 enough = plan.threads == 1 ? 1 : kTasksOfThread * i64{plan.threads};
  return std::clamp<i64>(tasks / enough, 1, std::max<i64>(most, 1));
}

i64 tiles_of_split(const Problem& problem, const Plan& plan, i64 tiles) {
  if (problem.batch_invariant || problem.num_splits == 1 || tiles < 2) return tiles;
  if (problem.num_splits > 1) return ceil_div(tiles, std::min<i64>(tiles, problem.num_splits));
  const i64 heads = std::max<i64>(saturating_multiply(problem.batch, problem.kv_heads), 1);
  const i64 tasks = plan.reads_in_place ? kTasksInPlace : kTasksOfCall;
  if (plan.packs_ahead || heads >= tasks) return tiles;
  return ceil_div(tiles, std::min(tiles, ceil_div(tasks, heads)));
}

}  // namespace

i64 forward_score_stride(i64 key_block) { return key_block + kScoreStrideExtra; }

ForwardThreadScratch forward_thread_scratch(const Problem& problem, const Plan& plan) {
  ForwardThreadScratch scratch;
  const auto take = [&](i64& start, i64 count, i64 size) {
    start = scratch.bytes;
    scratch.bytes += aligned_bytes(count * size);
  };
  const i64 block = std::min(plan.query_block, rows_of_head(problem)), d = problem.head_dim;
  const i64 rows = plan.reads_in_place ? block : block + kMostPanelRows;
  const i64 keys = key_block(plan), tile = std::min(keys, round_up(problem.max_keys, kMostColumns));
  const i64 width = plan.reads_in_place ? round_up(d, kMostColumns) : round_up(d, plan.depth);
  const i64 panel = plan.reads_in_place ? rows : kMostPanelRows;
  const i64 converted = kKeysTogether * std::max(width, value_width(problem));
  take(scratch.rows, rows, kQueryRowBytes);
  take(scratch.queries, rows * width, packed_item(plan));
  take(scratch.scores, panel * forward_score_stride(keys), item(problem));
  take(scratch.outputs, rows * value_width(problem), item(problem));
  scratch.slot_bytes = scratch.bytes;
  scratch.bytes *= plan.heads_together;
  take(scratch.bias, problem.bias.given ? keys : 0, item(problem));
  take(scratch.keep, problem.rules.dropout > 0 ? keys / 8 : 0, 1);
  take(scratch.allowed, problem.mask.given ? keys : 0, 1);
  take(scratch.pointers, std::max(rows, 2 * (keys + kRowsBeyond)), static_cast<i64>(sizeof(void*)));
  take(scratch.rotated, problem.rotary_pairs ? kMostPanelRows * d : 0, item(problem));
  const i64 packed = plan.packs_ahead ? 0 : tile * packed_row(problem, plan);
  take(scratch.tile, plan.reads_in_place ? converted * item(problem) : packed, 1);
  return scratch;
}

i64 forward_splits(const Problem& problem, const Plan& plan) {
  return plan.split_keys ? std::max<i64>(ceil_div(problem.max_keys, plan.split_keys), 1) : 1;
}

Regions forward_scratch(const Problem& problem, const Plan& plan) {
  const i64 splits = forward_splits(problem, plan), heads = plan.heads_at_once;
  const i64 rows = splits > 1 ? saturating_multiply(rows_of_head(problem), splits) : 0;
  const i64 outputs = splits > 1 ? partial_output_bytes(problem, splits) : 0;
  return {
      {"packed K and V", plan.packs_ahead ? aligned_bytes(saturating_multiply(heads, packed_bytes(problem, plan))) : 0},
      {"kv heads", aligned_bytes(heads * kKvHeadBytes)},
      {"progress of heads", aligned_bytes(heads * kHeadProgressBytes)},
      {"query blocks", plan.threads * forward_thread_scratch(problem, plan).bytes},
      {"partial O", aligned_bytes(saturating_multiply(heads, outputs))},
      {"partial sums", aligned_bytes(saturating_multiply(heads, saturating_multiply(rows, kRunningSumBytes)))}};
}

void plan_cpu_forward(const Problem& problem, Plan& plan) {
  // Where a kv head has one query block, nobody else reads what it packs: tile by tile, it stays in cache.
  plan.packs_ahead = !plan.reads_in_place && rows_of_head(problem) > plan.query_block;
  const i64 tiles = ceil_div(problem.max_keys, plan.key_block);
  const i64 split = tiles_of_split(problem, plan, tiles);
  plan.split_keys = split < tiles ? split * plan.key_block : 0;
  plan.heads_together = heads_together(problem, plan);

  const i64 splits = forward_splits(problem, plan);
  const i64 head_bytes = saturating_add(plan.packs_ahead ? packed_bytes(problem, plan) : 0,
                                        splits > 1 ? partial_output_bytes(problem, splits) : 0);
  const i64 heads = std::max<i64>(saturating_multiply(problem.batch, problem.kv_heads), 1);
  const i64 most = plan.packs_ahead ? std::min(heads, most_heads_at_once(plan)) : std::min(heads, kMostHeads);
  plan.heads_at_once = std::clamp<i64>(kPackedBytes / std::max<i64>(head_bytes, 1), 1, most);
  plan.workspace = forward_scratch(problem, plan);
}

}  // namespace narrows
