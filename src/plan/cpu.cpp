// Family cpu: what it takes, and its tuned numbers.
#include "core/error.hpp"
#include "plan/plan.hpp"

#include <algorithm>
#include <array>

namespace narrows {
namespace {

/// Tile sizes, one row for each instruction set and accumulator.
struct Tiles {
  std::string_view instruction_set;
  DType accumulator;
  i64 query_block;  // rows whose Q and O stay in L2 while K and V stream by
  i64 key_block;    // a panel of S, some rows by this many keys, stays in L1
};
constexpr std::array kTiles{
    Tiles{"avx512", DType::fp32, 192, 512},   Tiles{"avx512", DType::fp64, 96, 256},
    Tiles{"avx2", DType::fp32, 192, 512},     Tiles{"avx2", DType::fp64, 96, 256},
    Tiles{"portable", DType::fp32, 192, 512}, Tiles{"portable", DType::fp64, 96, 256},
};

constexpr i64 kPackedBytes = i64{256} << 20;  // of K and V copies at once, or one head's where that is more
constexpr double kFlopsForThreads = 4e6;      // below, handing out work costs more than it saves

std::string unsupported(const Problem& problem) {
  if (problem.device.kind != DeviceKind::cpu) return text("the tensors are on ", problem.device);
  if (problem.operation == Operation::backward) return "backward comes in a later version";
  if (problem.rules.dropout > 0)
    return text("dropout = ", problem.rules.dropout, " comes in a later version; this one takes 0");
  if (problem.key_form == KeyForm::cache || problem.key_form == KeyForm::pages)
    return "KV-cache calls come in a later version";
  if (problem.num_splits > 1)
    return text("num_splits = ", problem.num_splits, " comes in a later version; this one takes 0 or 1");
  if (problem.workspace_bytes >= 0) return "a workspace of the caller's comes in a later version";
  if (problem.head_dim > 512) return text("head dim ", problem.head_dim, " is above 512");
  return {};
}

}  // namespace

std::variant<Plan, Refusal> consider_cpu(const Problem& problem, const Work& work, const Machine& machine) {
  if (Refusal reason = unsupported(problem); !reason.empty()) return reason;
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
  plan.threads = problem.threads ? problem.threads : machine.threads;
  if (work.flops < kFlopsForThreads) plan.threads = 1;
  const i64 item = static_cast<i64>(item_size(accumulate));
  const i64 width = problem.head_dim + problem.value_dim;
  const i64 padded_keys = saturating_multiply(ceil_div(problem.max_keys, plan.key_block), plan.key_block);
  const i64 head_bytes = saturating_multiply(padded_keys, width * item);
  const i64 heads = std::max<i64>(saturating_multiply(problem.batch, problem.kv_heads), 1);
  plan.heads_at_once = std::clamp<i64>(kPackedBytes / std::max<i64>(head_bytes, 1), 1, heads);
  plan.workspace = {{"packed K and V", saturating_multiply(plan.heads_at_once, head_bytes)},
                    {"query blocks", plan.threads * plan.query_block * (width + 2) * item}};
  const double peak = machine.flops_per_second * plan.threads / std::max(machine.threads, 1);
  plan.prediction = predict(work.flops, work.fused_bytes, peak, machine.bytes_per_second);
  return plan;
}

}  // namespace narrows
