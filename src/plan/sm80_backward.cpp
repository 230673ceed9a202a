#include "plan/sm80_backward.hpp"

#include "plan/scratch.hpp"
#include "plan/sm80_shared.hpp"
#include "shared/tile_order.h"

#include <algorithm>
#include <array>
#include <optional>

namespace narrows {
namespace {

using namespace sm80;

/// Tile sizes by the wider of the two head dims; of the rows of one width the first that fits the device's shared memory is
/// taken.
struct BackwardTiles {
  i32 element_bytes;
  i32 width;
  i32 query_block, key_block;
  i32 ruled_query_block;  // with softcap, a bias or dropout, which take registers
  i32 warps, column_warps, stages, resident_blocks;
};
constexpr std::array kBackwardTiles{
    BackwardTiles{2, 32, 64, 128, 32, 4, 1, 2, 2},  BackwardTiles{2, 32, 64, 128, 32, 4, 1, 2, 1},
    BackwardTiles{2, 64, 32, 128, 32, 4, 1, 2, 2},  BackwardTiles{2, 64, 32, 128, 32, 4, 1, 2, 1},
    BackwardTiles{2, 96, 64, 128, 32, 8, 1, 2, 1},  BackwardTiles{2, 96, 32, 64, 32, 4, 1, 2, 1},
    BackwardTiles{2, 128, 64, 128, 32, 8, 2, 2, 1}, BackwardTiles{2, 128, 64, 128, 32, 8, 2, 1, 1},
    BackwardTiles{2, 128, 64, 64, 32, 4, 2, 1, 1},  BackwardTiles{2, 192, 64, 64, 32, 8, 2, 2, 1},
    BackwardTiles{2, 192, 64, 64, 32, 8, 2, 1, 1},  BackwardTiles{2, 192, 32, 32, 32, 4, 2, 1, 1},
    BackwardTiles{2, 256, 64, 64, 32, 8, 4, 2, 1},  BackwardTiles{2, 256, 64, 64, 32, 8, 4, 1, 1},
    BackwardTiles{2, 256, 32, 32, 32, 4, 4, 1, 1},  BackwardTiles{2, 512, 64, 32, 64, 8, 8, 1, 1},
    BackwardTiles{2, 512, 32, 16, 32, 8, 8, 1, 1},  BackwardTiles{2, 512, 16, 16, 16, 8, 8, 1, 1},
    BackwardTiles{2, 576, 64, 32, 64, 8, 8, 1, 1},  BackwardTiles{2, 576, 32, 16, 32, 8, 8, 1, 1},
    BackwardTiles{2, 576, 16, 16, 16, 8, 8, 1, 1},  BackwardTiles{4, 32, 32, 128, 32, 8, 1, 2, 1},
    BackwardTiles{4, 32, 32, 64, 32, 4, 1, 2, 1},   BackwardTiles{4, 64, 32, 128, 32, 8, 1, 2, 1},
    BackwardTiles{4, 64, 32, 64, 32, 4, 1, 2, 1},   BackwardTiles{4, 96, 32, 64, 32, 4, 1, 2, 1},
    BackwardTiles{4, 96, 32, 32, 32, 4, 2, 1, 1},   BackwardTiles{4, 128, 32, 64, 32, 8, 2, 2, 1},
    BackwardTiles{4, 128, 32, 32, 32, 4, 2, 1, 1},  BackwardTiles{4, 192, 32, 32, 32, 8, 4, 1, 1},
    BackwardTiles{4, 192, 16, 32, 16, 4, 2, 1, 1},  BackwardTiles{4, 256, 32, 32, 32, 8, 4, 1, 1},
    BackwardTiles{4, 256, 16, 16, 16, 4, 4, 1, 1},  BackwardTiles{4, 512, 16, 16, 16, 8, 8, 1, 1},
    BackwardTiles{4, 576, 16, 16, 16, 8, 8, 1, 1},
};

constexpr i64 kMostBackwardWidth = kWidths.back();

/// Of the largest matrix products' rate, what the backward kernels reach, measured on an H200 (compute capability 9.0);
/// elsewhere no such figure is known.
double backward_reached(const Machine& machine) { return machine.compute_capability == 90 ? 0.27 : 1; }

constexpr i32 kPlainWarps = 4;  // of the kernels that make no products

BackwardConstants with_tiles(BackwardConstants rules, const BackwardTiles& tiles) {
  rules.query_block = rules.softcap || rules.bias || rules.dropout ? tiles.ruled_query_block : tiles.query_block;
  rules.key_block = tiles.key_block;
  rules.warps = tiles.warps;
  rules.column_warps = tiles.column_warps;
  rules.stages = tiles.stages;
  rules.resident_blocks = tiles.resident_blocks;
  return rules;
}

/// A warp's part of a row of results is 32 bytes at least: beside a much wider head dim the other one is padded.
void widen(BackwardConstants& constants) {
  constexpr i32 kPartBytes = 32;
  const i32 item = constants.element == Element::fp32 ? 4 : 2;
  // As kernels/backward_tiles.cuh cuts dQ.
  const i32 row_tiles = constants.query_block >= 64 && constants.head_width * item >= 128 ? 2 : 1;
  const i32 row_warps = std::max(constants.query_block / 16 / row_tiles, 1);
  const i32 sum_warps = std::max(constants.warps / row_warps, constants.column_warps);
  constants.head_width = width_of(std::max(constants.head_width, kPartBytes * sum_warps / item));
  constants.value_width = width_of(std::max(constants.value_width, kPartBytes * constants.column_warps / item));
}

/// The program that a call of these dtypes, head dims and rules takes; none where no row fits.
std::optional<BackwardConstants> backward_tiled(BackwardConstants rules, DType dtype, i32 head_width, i32 value_width,
                                                const Machine& machine) {
  rules.element = static_cast<Element>(dtype);
  rules.head_width = head_width;
  rules.value_width = value_width;
  rules.vector_sums = machine.compute_capability >= 90;
  for (const BackwardTiles& tiles : kBackwardTiles) {
    if (tiles.element_bytes != static_cast<i32>(item_size(dtype))) continue;
    if (tiles.width != std::max(head_width, value_width)) continue;
    BackwardConstants constants = with_tiles(rules, tiles);
    widen(constants);
    if (fits(backward_shared_bytes(constants), constants.resident_blocks, machine.shared_bytes)) return constants;
  }
  return std::nullopt;
}

/// What one copy may take: all tensors that are read are rows of such pieces.
int backward_copy_bytes(const Problem& problem) {
  CopyBytes copy(problem.dtype);
  for (const Layout* rows : {&problem.q, &problem.k}) copy.narrow(*rows, problem.head_dim);
  for (const Layout* rows : {&problem.v, &problem.o, &problem.dout}) copy.narrow(*rows, problem.value_dim);
  return copy.bytes();
}

std::string backward_refusal(const Problem& problem, const Machine& machine) {
  if (std::string reason = device_refusal(machine); !reason.empty()) return reason;
  if (std::string reason = width_refusal(problem, kMostBackwardWidth); !reason.empty()) return reason;
  if (problem.num_splits > 1 && !problem.batch_invariant)
    return text("does not split keys, num_splits=", problem.num_splits);
  return rows_refusal(problem);
}

struct KernelNames {
  std::string_view source, function;
};
constexpr std::array kKernelNames{KernelNames{"backward_rows_sm80.cu", "backward_rows_sm80"},
                                  KernelNames{"backward_sm80.cu", "backward_sm80"},
                                  KernelNames{"backward_queries_sm80.cu", "backward_queries_sm80"},
                                  KernelNames{"backward_sums_sm80.cu", "backward_sums_sm80"},
                                  KernelNames{"backward_bias_sm80.cu", "backward_bias_sm80"}};

}  // namespace

Sm80BackwardBlocks backward_blocks(const Problem& problem, i64 query_block, i64 key_block) {
  const auto batch = static_cast<i32>(std::min(problem.batch, kMostBlocks));
  const bool varlen = problem.query_form == QueryForm::varlen, varlen_keys = problem.key_form == KeyForm::varlen;
  const auto blocks = [&](bool of_all, i64 rows, i64 block) {
    return of_all ? block_count(rows, batch, static_cast<i32>(block)) : ceil_div(rows, block);
  };
  const auto pairs = [&](bool of_all, i64 heads) { return of_all ? heads : saturating_multiply(problem.batch, heads); };
  return {blocks(varlen, problem.query_rows, query_block), blocks(varlen_keys, problem.key_rows, key_block),
          pairs(varlen, problem.heads), pairs(varlen_keys, problem.kv_heads)};
}

i64 backward_turns(const Problem& problem, i64 query_block, int warps) {
  const Sm80BackwardBlocks blocks = backward_blocks(problem, query_block, 1);
  return saturating_multiply(saturating_multiply(blocks.query_pairs, blocks.query_blocks), warps);
}

i64 bias_blocks(const Problem& problem, i64 query_block, i64 key_block) {
  if (!problem.wants_dbias) return 0;
  const auto& [batch, heads, rows, keys] = problem.dbias_sizes;
  return saturating_multiply(saturating_multiply(batch, heads),
                             saturating_multiply(ceil_div(rows, query_block), ceil_div(keys, key_block)));
}

i64 backward_shared_bytes(const BackwardConstants& constants) {
  const i64 item = constants.element == Element::fp32 ? 4 : 2, stages = constants.stages;
  const i64 queries = constants.query_block, keys = constants.key_block;
  const i64 row = item * (constants.head_width + constants.value_width);  // of K and V, and of Q and dO
  const i64 scores = keys * std::max<i64>(queries * item, 64);
  const i64 score_tiles = 2;  // two of dS in turn; or, where warps share keys, one of dS and one of P
  const i64 row_facts = queries * static_cast<i64>(sizeof(RowFacts) + 2 * sizeof(i32));
  return keys * row + stages * queries * row + score_tiles * scores + stages * row_facts;
}

i64 backward_shared_bytes(BackwardKernel kernel, const BackwardConstants& constants) {
  switch (kernel) {
    case BackwardKernel::keys:
    case BackwardKernel::bias: return backward_shared_bytes(constants);
    case BackwardKernel::queries:
      return i64{constants.query_block} * constants.head_width * (constants.element == Element::fp32 ? 4 : 2);
    case BackwardKernel::rows:
    case BackwardKernel::sums: return 0;
  }
  return 0;
}

BackwardConstants backward_constants(const Problem& problem, const Plan& plan) {
  BackwardConstants constants = rules_of<BackwardConstants>(problem);
  constants.element = static_cast<Element>(problem.dtype);
  constants.head_width = static_cast<i32>(plan.head_width);
  constants.value_width = static_cast<i32>(plan.value_width);
  constants.query_block = static_cast<i32>(plan.query_block);
  constants.key_block = static_cast<i32>(plan.key_block);
  constants.warps = plan.warps;
  constants.column_warps = plan.column_warps;
  constants.stages = plan.stages;
  constants.copy_bytes = plan.copy_bytes;
  constants.resident_blocks = plan.resident_blocks;
  constants.vector_sums = plan.vector_sums;
  constants.deterministic = plan.takes_turns;
  constants.facts_apart = plan.family == "sm90";
  return constants;
}

BackwardConstants constants_of(BackwardKernel kernel, const BackwardConstants& constants) {
  BackwardConstants own;
  own.element = constants.element;
  own.query_block = constants.query_block;
  own.key_block = constants.query_block;
  own.copy_bytes = constants.copy_bytes;
  own.stages = own.resident_blocks = 1;
  own.warps = kPlainWarps;
  switch (kernel) {
    case BackwardKernel::keys: return constants;
    case BackwardKernel::bias:
      own = constants;
      own.deterministic = own.vector_sums = false;  // it adds to no dQ
      return own;
    case BackwardKernel::rows:
      own.head_width = constants.head_width;  // of the sums of dQ
      own.value_width = constants.value_width;
      own.natural = constants.natural;
      own.facts_apart = constants.facts_apart;
      own.deterministic = constants.deterministic && constants.facts_apart;
      own.copy_bytes = constants.copy_bytes == 16 ? 16 : 0;
      return own;
    case BackwardKernel::queries:
      own.head_width = own.value_width = constants.head_width;
      own.key_block = 16 * kPlainWarps;
      own.copy_bytes = 16;
      own.vector_sums = constants.vector_sums;
      return own;
    case BackwardKernel::sums:
      own.head_width = own.value_width = kWidths.front();
      own.key_block = constants.key_block;
      own.copy_bytes = 16;
      return own;
  }
  return own;
}

Program backward_program(BackwardKernel kernel, const BackwardConstants& constants) {
  Config config("shared/backward_args.h");
  config.tiles_and_rules(constants, 32 * constants.warps);
  config.number("kColumnWarps", constants.column_warps);
  config.number("kStages", constants.stages);
  config.flag("kVectorSums", constants.vector_sums);
  config.flag("kDeterministic", constants.deterministic);
  config.flag("kFactsApart", constants.facts_apart);
  const KernelNames& names = kKernelNames[static_cast<std::size_t>(kernel)];
  return {names.source, names.function, config.text(), constants.element == Element::fp32,
          kernel == BackwardKernel::queries};
}

std::string backward_size_refusal(const Problem& problem, const BackwardConstants& constants) {
  const Sm80BackwardBlocks blocks = backward_blocks(problem, constants.query_block, constants.key_block);
  if (std::string reason = blocks_refusal("query rows", blocks.query_blocks, blocks.query_pairs); !reason.empty())
    return reason;
  if (std::string reason = blocks_refusal("keys", blocks.key_blocks, blocks.key_pairs); !reason.empty()) return reason;
  if (problem.dslopes_per_batch && saturating_multiply(problem.batch, problem.heads) > kMostBlocks)
    return text("takes up to ", kMostBlocks, " slopes of heads in a batch");
  const i64 dbias = bias_blocks(problem, constants.query_block, constants.key_block);
  if (dbias > kMostBlocks) return text("takes up to ", kMostBlocks, " tiles of dbias, not ", dbias);
  return "";
}

Regions backward_regions(const Problem& problem, const BackwardConstants& constants) {
  const Sm80BackwardBlocks blocks = backward_blocks(problem, constants.query_block, constants.key_block);
  const i64 query_blocks = saturating_multiply(blocks.query_pairs, blocks.query_blocks);
  const i64 rows = saturating_multiply(query_blocks, constants.query_block);
  const i64 row_of_sums = constants.head_width * static_cast<i64>(sizeof(float));
  // Of all sequences, a query head: pairs of keys are kv heads.
  const i64 key_blocks = saturating_multiply(saturating_multiply(blocks.key_pairs, blocks.key_blocks), problem.group());
  const auto bytes = [](bool wanted, i64 count, i64 size) {
    return wanted ? aligned_bytes(saturating_multiply(count, size)) : 0;
  };
  return {{"facts of rows", bytes(true, rows, static_cast<i64>(sizeof(RowFacts)))},
          {"sums of dQ", bytes(problem.wants_dq, rows, row_of_sums)},
          {"far rows", bytes(true, 1, static_cast<i64>(sizeof(u32)))},
          {"sums of dslopes", bytes(problem.wants_dslopes, key_blocks, static_cast<i64>(sizeof(float)))},
          {"sums of dsinks", bytes(problem.wants_dsinks, query_blocks, static_cast<i64>(sizeof(float)))},
          {"turns", bytes(constants.deterministic,
                          saturating_add(backward_turns(problem, constants.query_block, constants.warps), 1),
                          static_cast<i64>(sizeof(u32)))}};
}

i64 backward_section(const Problem& problem, const Machine& machine, const Plan& plan) {
  const i64 key_pairs = backward_blocks(problem, plan.query_block, plan.key_block).key_pairs;
  const bool turns_of_sm80 = plan.takes_turns && plan.family != "sm90";
  if (turns_of_sm80) return std::max<i64>(key_pairs, 1);
  if ((!limits_keys(problem.rules) && !plan.takes_turns) || problem.max_queries == 0 || problem.group() == 0) return 1;
  const i64 row = (problem.head_dim + problem.value_dim) * static_cast<i64>(item_size(problem.dtype)) +
                  (problem.wants_dq ? problem.head_dim * static_cast<i64>(sizeof(float)) : 0);
  const double head = static_cast<double>(problem.max_queries) * static_cast<double>(problem.group() * row);
  return even_section(key_pairs, heads_in_l2(machine, head));
}

double padded_backward_flops(const Work& work, const Problem& problem, const Plan& plan) {
  const auto columns = [](i64 head, i64 value) { return static_cast<double>(3 * head + 2 * value); };
  const double own = columns(problem.head_dim, problem.value_dim);
  return own == 0 ? work.flops : work.flops * columns(plan.head_width, plan.value_width) / own;
}

std::variant<Plan, Refusal> consider_sm80_backward(const Problem& problem, const Work& work, const Machine& machine) {
  if (std::string reason = backward_refusal(problem, machine); !reason.empty()) return reason;
  BackwardConstants rules = rules_of<BackwardConstants>(problem);
  // A row of dQ has its bits from what it sees alone only where they are added in the order of keys.
  rules.deterministic = problem.deterministic || problem.batch_invariant;
  const std::optional<BackwardConstants> constants =
      backward_tiled(rules, problem.dtype, width_of(problem.head_dim), width_of(problem.value_dim), machine);
  if (!constants) return text("no tiles fit ", machine.shared_bytes, " bytes of shared memory");
  if (std::string reason = backward_size_refusal(problem, *constants); !reason.empty()) return reason;

  Plan plan;
  plan.family = "sm80";
  plan.head_width = constants->head_width;
  plan.value_width = constants->value_width;
  plan.query_block = constants->query_block;
  plan.key_block = constants->key_block;
  plan.warps = constants->warps;
  plan.column_warps = constants->column_warps;
  plan.stages = constants->stages;
  plan.resident_blocks = constants->resident_blocks;
  plan.copy_bytes = backward_copy_bytes(problem);
  plan.vector_sums = constants->vector_sums;
  plan.takes_turns = constants->deterministic;
  plan.shared_bytes = backward_shared_bytes(*constants);
  plan.section = backward_section(problem, machine, plan);
  plan.workspace = backward_regions(problem, *constants);
  const double rate =
      machine.flops_per_second * backward_reached(machine) * (problem.dtype == DType::fp32 ? kFp32Rate : 1);
  plan.prediction =
      predict(padded_backward_flops(work, problem, plan), work.fused_bytes, rate, machine.bytes_per_second);
  return plan;
}

namespace {

/// Programs, each once.
class PlannedBackward {
 public:
  explicit PlannedBackward(const Machine& machine) : machine_(machine) {}

  /// whole: with the call's other kernels.
  void add(BackwardConstants rules, DType dtype, i32 width, bool whole, int copy_bytes = 16) {
    rules.natural |= rules.softcap || rules.alibi || rules.bias;
    std::optional<BackwardConstants> constants =
        backward_tiled(rules, dtype, width, std::min(width, kWidestValue), machine_);
    if (!constants) return;
    constants->copy_bytes = copy_bytes;
    add(BackwardKernel::keys, *constants);
    if (!whole) return;
    add(BackwardKernel::rows, *constants);
    add(BackwardKernel::queries, *constants);
    if (rules.alibi) add(BackwardKernel::sums, *constants);
    if (rules.bias) add(BackwardKernel::bias, *constants);
  }
  std::vector<Program> programs() && { return std::move(programs_); }

 private:
  void add(BackwardKernel kernel, const BackwardConstants& constants) {
    Program program = backward_program(kernel, constants_of(kernel, constants));
    const auto same = [&](const Program& other) {
      return other.function == program.function && other.config == program.config;
    };
    if (std::none_of(programs_.begin(), programs_.end(), same)) programs_.push_back(std::move(program));
  }

  const Machine& machine_;
  std::vector<Program> programs_;
};

}  // namespace

std::vector<Program> planned_backward_programs(const Machine& machine) {
  constexpr std::array kRules{&BackwardConstants::softcap, &BackwardConstants::alibi,
                              &BackwardConstants::bias,    &BackwardConstants::mask,
                              &BackwardConstants::dropout, &BackwardConstants::deterministic};
  constexpr i32 kEachRuleAt = 128;
  const auto is_common = [](i32 width) { return width == 64 || width == kEachRuleAt; };
  PlannedBackward planned(machine);
  BackwardConstants all;
  for (bool BackwardConstants::*rule : kRules) all.*rule = true;
  for (const i32 width : kWidths) planned.add({}, DType::bf16, width, is_common(width));
  for (const i32 width : {kEachRuleAt, kWidths.back()}) planned.add(all, DType::bf16, width, width == kEachRuleAt);
  for (const i32 width : {64, kEachRuleAt, 256, kWidths.back()}) planned.add({}, DType::fp32, width, is_common(width));
  planned.add({}, DType::fp16, kEachRuleAt, true);
  for (bool BackwardConstants::*rule : kRules) {
    BackwardConstants one;
    one.*rule = true;
    planned.add(one, DType::bf16, kEachRuleAt, false);
  }
  planned.add({}, DType::bf16, kEachRuleAt, false, 2);
  return std::move(planned).programs();
}

}  // namespace narrows
