// Family cpu: what it takes, and its tuned numbers.
#include "core/error.hpp"
#include "plan/cpu_backward.hpp"
#include "plan/cpu_forward.hpp"

#include <algorithm>
#include <array>

namespace narrows {
namespace {

/// Tile sizes, one row for each instruction set and accumulator. A set whose operands are narrower than its sums serves
/// tensors of the operands' type alone.
struct CpuTiles {
  std::string_view instruction_set;
  DType accumulator, operand;
  i64 depth;        // elements that a product sums over come in multiples of this
  i64 query_block;  // rows whose Q and O stay in L2 while K and V stream by
  i64 key_block;    // a panel of S, some rows by this many keys, stays in L1
  // Decode: up to so many rows of a kv head read K and V where they lie, so many keys at a time. On a Zen 3 core packing begins
  // to pay between 32 and 64 rows.
  i64 decode_rows, decode_key_block;
  // Backward: P and dS of a block of rows by a block of keys, and what they are made of, stay in L2; Q and dO are packed
  // again for every chunk of keys.
  i64 backward_query_block, backward_key_block, key_chunk;
};
constexpr std::array kCpuTiles{
    CpuTiles{"amx", DType::fp32, DType::bf16, 32, 192, 1024, 32, 256, 192, 256, 512},
    CpuTiles{"avx512bf16", DType::fp32, DType::bf16, 2, 192, 512, 32, 256, 96, 128, 512},
    CpuTiles{"avx512", DType::fp32, DType::fp32, 1, 192, 1024, 32, 256, 96, 128, 512},
    CpuTiles{"avx512", DType::fp64, DType::fp64, 1, 96, 256, 32, 256, 48, 64, 256},
    CpuTiles{"avx2", DType::fp32, DType::fp32, 1, 192, 512, 32, 256, 96, 128, 512},
    CpuTiles{"avx2", DType::fp64, DType::fp64, 1, 96, 256, 32, 256, 48, 64, 256},
    // AVX2's in whole panels of 10 rows; not yet measured.
    CpuTiles{"neon", DType::fp32, DType::fp32, 1, 200, 512, 32, 256, 80, 128, 512},
    CpuTiles{"neon", DType::fp64, DType::fp64, 1, 100, 256, 32, 256, 40, 64, 256},
    CpuTiles{"portable", DType::fp32, DType::fp32, 1, 192, 512, 32, 256, 96, 128, 512},
    CpuTiles{"portable", DType::fp64, DType::fp64, 1, 96, 256, 32, 256, 48, 64, 256},
};

// Where operands are rounded a result has to have this many columns: the criterion allows a weight's rounding twice the plain
// computation's error in the row, which is nearly 0 for one row in some hundred where a row is a few numbers.
constexpr i64 kLeastRoundedColumns = 16;

bool takes(const CpuTiles& row, const Problem& problem, bool wide_operands) {
  if (row.accumulator != accumulator(problem.dtype)) return false;
  if (row.operand == row.accumulator || wide_operands) return row.operand == row.accumulator;
  const bool backward = problem.operation == Operation::backward;
  const i64 columns = backward ? std::min(problem.head_dim, problem.value_dim) : problem.value_dim;
  // Queries are rotated in fp32: rounded again they would cost the LSE 10^-3.
  return row.operand == problem.dtype && columns >= kLeastRoundedColumns && !problem.rotary_pairs;
}

const CpuTiles* tiles_for(const Problem& problem, std::span<const std::string_view> instruction_sets,
                          bool wide_operands = false) {
  for (const std::string_view name : instruction_sets)
    for (const CpuTiles& row : kCpuTiles)
      if (row.instruction_set == name && takes(row, problem, wide_operands)) return &row;
  return nullptr;
}

// Below both, handing out work costs more than it saves.
constexpr double kFlopsForThreads = 4e6;
constexpr i64 kBytesForThreads = 1'000'000;

}  // namespace

std::variant<Plan, Refusal> consider_cpu(const Problem& problem, const Work& work, const Machine& machine) {
  const CpuTiles* tiles = tiles_for(problem, machine.instruction_sets);
  if (!tiles) return text("no instruction set of ", machine.name, " has tile sizes for ", problem.dtype);

  Plan plan;
  plan.family = "cpu";
  if (problem.operation == Operation::forward && rows_of_head(problem) <= tiles->decode_rows) {
    // One kernel must serve prefill, chunks and decoding for a row to get the same bits in all of them.
    plan.keeps_kernel = problem.batch_invariant;
    plan.reads_in_place = !problem.batch_invariant;
  }
  // Reading in place has weights of the sums' type.
  const CpuTiles* const wide = tiles_for(problem, machine.instruction_sets, true);
  plan.reads_in_place = plan.reads_in_place && wide;
  if (plan.reads_in_place) tiles = wide;
  plan.instruction_set = tiles->instruction_set;
  plan.operand = tiles->operand;
  plan.depth = tiles->depth;
  plan.threads = problem.threads ? problem.threads : machine.threads;
  if (work.flops < kFlopsForThreads && work.fused_bytes < kBytesForThreads) plan.threads = 1;
  if (problem.operation == Operation::backward) {
    plan.query_block = tiles->backward_query_block;
    plan.key_block = tiles->backward_key_block;
    plan.key_chunk = tiles->key_chunk;
    plan_cpu_backward(problem, plan);
  } else {
    plan.query_block = tiles->query_block;
    plan.key_block = plan.reads_in_place ? tiles->decode_key_block : tiles->key_block;
    plan_cpu_forward(problem, plan);
  }
  const double cores = std::min(plan.threads, machine.threads) / static_cast<double>(std::max(machine.threads, 1));
  plan.prediction =
      predict(work.flops, work.fused_bytes, product_rate(machine, plan.operand) * cores, machine.bytes_per_second);
  return plan;
}

}  // namespace narrows
