#include "plan/sm90_backward.hpp"

#include "plan/sm80_backward.hpp"
#include "plan/sm80_shared.hpp"
#include "plan/sm90_products.hpp"
#include "plan/sm90_shared.hpp"

#include <algorithm>
#include <array>
#include <utility>

namespace narrows {
namespace {

constexpr i32 kBackwardKeyBlock = 128, kBackwardKeyWarps = 8;
/// Of a fourth warpgroup, in which two threads take and pass turns, and what it leaves to the warpgroups of keys.
constexpr i32 kTurnRegisters = 32, kKeyRegistersBesideTurns = 208;
/// Beyond, two thread blocks share a block of keys, and the narrower head dim is no less.
constexpr i32 kWidestAlone = 128;
/// Of a thread block, on every device of this family; tiles begin behind 1024 bytes that have other uses.
constexpr i64 kSharedOfBlock = 232448 - 1024;

/// The first row of a width that takes a call's rules is its own.
struct Sm90BackwardTiles {
  i32 width;     // the wider of the two head dims
  bool natural;  // takes score rules
  i32 query_block, cluster, stages, pace, turn_rows, sum_registers, key_registers;
  bool takes_turns;  // the warpgroups of keys, at the tensor cores: nothing at 64 columns
};
constexpr std::array kSm90BackwardTiles{Sm90BackwardTiles{64, false, 128, 1, 3, 32, 128, 64, 216, false},
                                        Sm90BackwardTiles{64, true, 64, 1, 4, 32, 128, 64, 216, false},
                                        Sm90BackwardTiles{128, true, 64, 1, 3, 32, 64, 64, 216, true},
                                        Sm90BackwardTiles{192, true, 64, 2, 2, 32, 256, 64, 160, false},
                                        Sm90BackwardTiles{256, true, 64, 2, 2, 32, 256, 64, 160, false}};

/// Of the largest matrix products' rate, what long sequences reach, measured on an H200: 0.50 at 64 columns, 0.57 at 128, 0.52 at
/// 256.
constexpr double kSm90BackwardReached = 0.5;

i32 sm90_backward_width(i64 head_dim, i64 other_head_dim) {
  for (const Sm90BackwardTiles& row : kSm90BackwardTiles)
    if (row.width >= head_dim && (row.width >= kWidestAlone || other_head_dim <= kWidestAlone)) return row.width;
  return kSm90BackwardTiles.back().width;
}

BackwardSm90Constants with_tiles(BackwardSm90Constants rules, i32 head_width, i32 value_width) {
  const Sm90BackwardTiles& tiles =
      *std::find_if(kSm90BackwardTiles.begin(), kSm90BackwardTiles.end(), [&](const Sm90BackwardTiles& row) {
        return row.width == std::max(head_width, value_width) && row.natural >= rules.natural;
      });
  rules.head_width = head_width;
  rules.value_width = value_width;
  rules.query_block = tiles.query_block;
  rules.key_block = kBackwardKeyBlock;
  rules.cluster = tiles.cluster;
  rules.stages = rules.output_stages = tiles.stages;
  rules.pace = tiles.pace;
  rules.turn_rows = rules.deterministic ? tiles.turn_rows : 0;
  rules.sum_registers = tiles.sum_registers;
  rules.takes_turns = tiles.takes_turns;
  rules.key_registers = rules.deterministic && rules.cluster == 1 ? kKeyRegistersBesideTurns : tiles.key_registers;
  // Q is asked for before dO.
  while (rules.output_stages > 1 && backward_sm90_shared_bytes(rules) > kSharedOfBlock) --rules.output_stages;
  return rules;
}

std::string sm90_backward_refusal(const Problem& problem, const Machine& machine) {
  if (std::string reason = sm90::device_refusal(machine); !reason.empty()) return reason;
  if (std::string reason = sm90::dtype_refusal(problem); !reason.empty()) return reason;
  if (std::string reason = sm90::head_dim_refusal(problem, kSm90BackwardTiles.back().width); !reason.empty())
    return reason;
  if (std::string reason = sm90::rules_refusal(problem); !reason.empty()) return reason;
  for (const auto& [name, layout] : {std::pair{"q", &problem.q}, std::pair{"k", &problem.k}, std::pair{"v", &problem.v},
                                     std::pair{"o", &problem.o}, std::pair{"dout", &problem.dout}})
    if (std::string reason = sm90::layout_refusal(name, *layout); !reason.empty()) return reason;
  // The copy engine knows no empty tensors.
  if (problem.batch == 0 || problem.query_rows == 0 || problem.heads == 0) return "needs a query row";
  if (problem.key_rows == 0) return "needs a key";
  if (problem.head_dim == 0 || problem.value_dim == 0) return "needs columns of q and v";
  return sm80::rows_refusal(problem);
}

}  // namespace

BackwardSm90Constants backward_sm90_constants(const Problem& problem) {
  const auto common = sm80::rules_of<BackwardConstants>(problem);
  BackwardSm90Constants constants;
  constants.element = static_cast<Element>(problem.dtype);
  constants.limits_keys = sm80::limits_keys(problem.rules);
  constants.natural = common.natural;
  constants.softcap = common.softcap;
  constants.alibi = common.alibi;
  constants.deterministic = problem.deterministic;
  return with_tiles(constants, sm90_backward_width(problem.head_dim, problem.value_dim),
                    sm90_backward_width(problem.value_dim, problem.head_dim));
}

i64 backward_sm90_shared_bytes(const BackwardSm90Constants& constants) {
  constexpr i64 kItem = 2, kChunkColumns = 64;
  const i64 queries = constants.query_block, own_keys = constants.key_block / constants.cluster;
  const i64 head_row = kItem * constants.head_width, value_row = kItem * constants.value_width;
  const i64 keys = own_keys * (head_row + value_row);
  const i64 stages = queries * (constants.stages * (head_row + static_cast<i64>(sizeof(RowFacts))) +
                                constants.output_stages * value_row);
  const i64 gradients = 2 * kItem * constants.key_block * queries;
  // Of a cluster besides: half of the columns of the other thread block's K, and P.
  const i64 half = ceil_div<i64>(constants.head_width / kChunkColumns, 2) * kChunkColumns;
  const i64 shared = constants.cluster == 1 ? 0 : kItem * own_keys * (half + 2 * queries);
  // What kernels/backward_steps_sm90.cuh keeps of the keys, and barriers; the kernel asserts that it is enough.
  const i64 facts = 256 + 8 * own_keys, barriers = constants.cluster == 1 ? 128 : 176;
  return keys + stages + gradients + shared + facts + barriers;
}

i32 backward_sm90_threads(const BackwardSm90Constants& constants) {
  constexpr i32 kWarpgroup = 128;
  const bool wide = constants.cluster > 1;
  const i32 that_sum = 3, that_score = wide ? 1 : 0, that_take_turns = !wide && constants.deterministic ? 1 : 0;
  return kWarpgroup * (that_sum + that_score + that_take_turns);
}

Program backward_sm90_program(const BackwardSm90Constants& constants) {
  const bool wide = constants.cluster > 1;
  BackwardConstants common;  // what the headers that it shares with family sm80 ask for
  common.element = constants.element;
  common.head_width = constants.head_width;
  common.value_width = constants.value_width;
  common.query_block = constants.query_block;
  common.key_block = constants.key_block;
  common.warps = kBackwardKeyWarps;
  common.copy_bytes = sm90::kUnitBytes;
  common.resident_blocks = 1;
  common.natural = constants.natural;
  common.softcap = constants.softcap;
  common.alibi = constants.alibi;
  sm80::Config config("shared/backward_sm90_args.h");
  config.tiles_and_rules(common, backward_sm90_threads(constants));
  config.number("kColumnWarps", 1);
  config.number("kCluster", constants.cluster);
  config.number("kStages", constants.stages);
  config.number("kPace", constants.pace);
  config.number("kTurnRows", constants.turn_rows);
  config.number("kSumRegisters", constants.sum_registers);
  config.number("kKeyRegisters", constants.key_registers);
  config.number(wide ? "kOutputStages" : "kTurnRegisters", wide ? constants.output_stages : kTurnRegisters);
  config.number("kSharedBytes", static_cast<int>(backward_sm90_shared_bytes(constants)));
  config.flag("kVectorSums", true);
  config.flag("kLimitsKeys", constants.limits_keys);
  config.flag("kDeterministic", constants.deterministic);
  if (!wide) config.flag("kTakesTurns", constants.takes_turns);
  if (wide) {
    config.add(sm90::backward_wide_products_text(constants.element, constants.query_block));
    return {"backward_wide_sm90.cu", "backward_wide_sm90", config.text(), false, true};
  }
  config.add(sm90::backward_products_text(constants.element, constants.query_block, constants.head_width,
                                          constants.value_width));
  return {"backward_sm90.cu", "backward_sm90", config.text(), false, true};
}

std::variant<Plan, Refusal> consider_sm90_backward(const Problem& problem, const Work& work, const Machine& machine) {
  if (std::string reason = sm90_backward_refusal(problem, machine); !reason.empty()) return reason;
  const BackwardSm90Constants constants = backward_sm90_constants(problem);
  Plan plan;
  plan.family = "sm90";
  plan.head_width = constants.head_width;
  plan.value_width = constants.value_width;
  plan.query_block = constants.query_block;
  plan.key_block = constants.key_block;
  plan.warps = kBackwardKeyWarps;
  plan.column_warps = 1;
  plan.stages = constants.stages;
  plan.resident_blocks = 1;
  plan.copy_bytes = sm90::kUnitBytes;
  plan.vector_sums = true;
  plan.takes_turns = constants.deterministic;
  plan.shared_bytes = backward_sm90_shared_bytes(constants);
  const BackwardConstants around = backward_constants(problem, plan);
  if (std::string reason = backward_size_refusal(problem, around); !reason.empty()) return reason;
  const Sm80BackwardBlocks blocks = backward_blocks(problem, plan.query_block, plan.key_block);
  if (blocks.key_blocks * blocks.key_pairs > sm80::kMostBlocks / constants.cluster)
    return text("takes up to ", sm80::kMostBlocks / constants.cluster, " blocks of keys");
  plan.section = backward_section(problem, machine, plan);
  plan.workspace = backward_regions(problem, around);
  plan.prediction = predict(padded_backward_flops(work, problem, plan), work.fused_bytes,
                            machine.flops_per_second * kSm90BackwardReached, machine.bytes_per_second);
  return plan;
}

std::vector<Program> planned_backward_sm90_programs(const Machine& machine) {
  constexpr std::array kFp16At{128, 256};  // it differs by the names of instructions, and by what is kept of weights
  std::vector<Program> programs;
  if (machine.compute_capability != 90) return programs;
  const auto add = [&](BackwardSm90Constants rules, i32 width, i32 value_width) {
    programs.push_back(backward_sm90_program(with_tiles(rules, width, value_width)));
  };
  for (const i32 width : {64, 128, 192, 256}) {
    for (const bool limits_keys : {false, true})
      for (const bool deterministic : {false, true}) {
        BackwardSm90Constants rules;
        rules.limits_keys = limits_keys;
        rules.deterministic = deterministic;
        add(rules, width, width);
      }
    BackwardSm90Constants all;
    all.limits_keys = all.natural = all.softcap = all.alibi = true;
    add(all, width, width);
  }
  BackwardSm90Constants causal;
  causal.limits_keys = true;
  add(causal, 192, 128);  // of latent attention
  causal.element = Element::fp16;
  for (const i32 width : kFp16At) add(causal, width, width);
  return programs;
}

}  // namespace narrows
