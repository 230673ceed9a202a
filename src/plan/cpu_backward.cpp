#include "plan/cpu_backward.hpp"

#include "core/error.hpp"

#include <algorithm>
#include <array>

namespace narrows {
namespace {

/// Tile sizes, one row for each instruction set and accumulator.
struct Tiles {
  std::string_view instruction_set;
  DType accumulator;
  i64 query_block, key_block;  // P and dS of a tile, its Q, dO, K, V and their gradients stay in L2
  i64 key_chunk;               // Q and dO are packed again for every chunk
};
constexpr std::array kTiles{
    Tiles{"avx512", DType::fp32, 96, 128, 512},   Tiles{"avx512", DType::fp64, 48, 64, 256},
    Tiles{"avx2", DType::fp32, 96, 128, 512},     Tiles{"avx2", DType::fp64, 48, 64, 256},
    Tiles{"portable", DType::fp32, 96, 128, 512}, Tiles{"portable", DType::fp64, 48, 64, 256},
};

constexpr i64 kTasks = 16;                     // that a call is cut into where it has fewer kv heads
constexpr i64 kPartialBytes = i64{256} << 20;  // of sums of dQ at once, or four of them where that is more
constexpr i64 kWidestStrip = 32;
constexpr double kFlopsForThreads = 4e6;  // below, handing out work costs more than it saves

/// How many kv heads run at once and into how many sums of dQ each is cut. Sizes alone decide, never threads: the cut decides
/// the order of the sums. batch_invariant: nor the batch, for a row adds exact zeros for the keys that it does not see.
void cut(Plan& plan, const Problem& problem, i64 partial_bytes) {
  const i64 heads = std::max<i64>(saturating_multiply(problem.batch, problem.kv_heads), 1);
  const i64 chunks = std::max<i64>(ceil_div(problem.max_keys, plan.key_chunk), 1);
  const i64 slots =
      problem.wants_dq ? std::max<i64>(kPartialBytes / std::max<i64>(partial_bytes, 1), 4) : heads + kTasks;
  i64 wanted = problem.batch_invariant ? kTasks : std::min(ceil_div(kTasks, heads), slots);
  if (problem.num_splits) wanted = problem.num_splits;
  plan.partials = std::min(wanted, chunks);
  plan.heads_at_once = std::clamp<i64>(slots / plan.partials, 1, heads);
}

/// Elements of one thread's scratch.
i64 thread_elements(const Plan& plan, const Problem& problem) {
  const auto whole = [](i64 size) { return ceil_div(size, kWidestStrip) * kWidestStrip; };
  const i64 d = whole(problem.head_dim), dv = whole(problem.value_dim), rows = whole(plan.query_block);
  const i64 tile_row = plan.key_block + 2 * kWidestStrip;
  const i64 queries = 2 * rows * (d + dv) + 2 * dv, tile = (2 * rows + 3) * tile_row;
  const i64 keys = whole(plan.key_chunk) * (2 * d + dv), gradients = plan.key_chunk * (d + dv);
  return queries + tile + keys + gradients;
}

}  // namespace

std::variant<Plan, Refusal> plan_cpu_backward(const Problem& problem, const Work& work, const Machine& machine) {
  const DType accumulate = accumulator(problem.dtype);
  const auto tiles = std::find_if(kTiles.begin(), kTiles.end(), [&](const Tiles& row) {
    return row.instruction_set == machine.instruction_set && row.accumulator == accumulate;
  });
  if (tiles == kTiles.end()) return text("no tile sizes for instruction set ", machine.instruction_set);
  Plan plan;
  plan.family = "cpu";
  plan.instruction_set = tiles->instruction_set;
  plan.query_block = tiles->query_block;
  plan.key_block = tiles->key_block;
  plan.key_chunk = tiles->key_chunk;
  plan.threads = problem.threads ? problem.threads : machine.threads;
  if (work.flops < kFlopsForThreads) plan.threads = 1;
  const i64 item = static_cast<i64>(item_size(accumulate));
  const i64 width = ceil_div(problem.head_dim, kWidestStrip) * kWidestStrip;
  const i64 partial_bytes =
      saturating_multiply(saturating_multiply(problem.max_queries, problem.group()), width * item);
  cut(plan, problem, partial_bytes);
  const i64 sums = problem.wants_dq ? saturating_multiply(plan.heads_at_once * plan.partials, partial_bytes) : 0;
  plan.workspace = {{"sums of dQ", sums}, {"tiles", plan.threads * thread_elements(plan, problem) * item}};
  const double peak = machine.flops_per_second * plan.threads / std::max(machine.threads, 1);
  plan.prediction = predict(work.flops, work.fused_bytes, peak, machine.bytes_per_second);
  return plan;
}

}  // namespace narrows
