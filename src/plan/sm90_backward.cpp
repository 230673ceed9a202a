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

constexpr i32 kBackwardKeyBlock = 128, kBackwardKeyWarps = 8, kBackwardThreads = 384;
/// Of a fourth warpgroup, in which two threads take and pass turns, and what it leaves to the warpgroups of keys.
constexpr i32 kTurnThreads = 128, kTurnRegisters = 32, kKeyRegistersBesideTurns = 208;

/// The first row of a width that takes a call's rules is its own.
struct Sm90BackwardTiles {
  i32 width;     // the wider of the two head dims
  bool natural;  // takes score rules
  i32 query_block, stages, pace, turn_rows, sum_registers, key_registers;
};
constexpr std::array kSm90BackwardTiles{Sm90BackwardTiles{64, false, 128, 3, 32, 128, 64, 216},
                                        Sm90BackwardTiles{64, true, 64, 4, 32, 128, 64, 216},
                                        Sm90BackwardTiles{128, true, 64, 3, 32, 64, 64, 216}};

/// Of the largest matrix products' rate, what long sequences reach, measured on an H200.
constexpr double kSm90BackwardReached = 0.5;

i32 sm90_backward_width(i64 head_dim) { return head_dim <= 64 ? 64 : 128; }

BackwardSm90Constants with_tiles(BackwardSm90Constants rules, i32 head_width, i32 value_width) {
  const Sm90BackwardTiles& tiles =
      *std::find_if(kSm90BackwardTiles.begin(), kSm90BackwardTiles.end(), [&](const Sm90BackwardTiles& row) {
        return row.width == std::max(head_width, value_width) && row.natural >= rules.natural;
      });
  rules.head_width = head_width;
  rules.value_width = value_width;
  rules.query_block = tiles.query_block;
  rules.key_block = kBackwardKeyBlock;
  rules.stages = tiles.stages;
  rules.pace = tiles.pace;
  rules.turn_rows = rules.deterministic ? tiles.turn_rows : 0;
  rules.sum_registers = tiles.sum_registers;
  rules.key_registers = rules.deterministic ? kKeyRegistersBesideTurns : tiles.key_registers;
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
  if (problem.query_rows == 0 || problem.heads == 0) return "needs a query row";
  if (problem.key_rows == 0) return "needs a key";
  if (problem.head_dim == 0 || problem.value_dim == 0) return "needs columns of q and v";
  return sm80::rows_refusal(problem);
}

/// What the kernel multiplies, for head dims that it pads.
double padded_flops(const Work& work, const Problem& problem, const Plan& plan) {
  const auto columns = [](i64 head, i64 value) { return static_cast<double>(3 * head + 2 * value); };
  return work.flops * columns(plan.head_width, plan.value_width) / columns(problem.head_dim, problem.value_dim);
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
  return with_tiles(constants, sm90_backward_width(problem.head_dim), sm90_backward_width(problem.value_dim));
}

i64 backward_sm90_shared_bytes(const BackwardSm90Constants& constants) {
  constexpr i64 kItem = 2;
  const i64 row = kItem * (constants.head_width + constants.value_width), queries = constants.query_block;
  const i64 stage = queries * (row + static_cast<i64>(sizeof(RowFacts)));
  const i64 gradients = 2 * kItem * constants.key_block * queries;
  // What kernels/backward_pipeline_sm90.cuh keeps of the keys, and barriers; the kernel asserts that it is enough.
  const i64 facts = 256 + 8 * constants.key_block, barriers = 128;
  return constants.key_block * row + constants.stages * stage + gradients + facts + barriers;
}

Program backward_sm90_program(const BackwardSm90Constants& constants) {
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
  config.tiles_and_rules(common, kBackwardThreads + (constants.deterministic ? kTurnThreads : 0));
  config.number("kColumnWarps", 1);
  config.number("kCluster", 1);
  config.number("kStages", constants.stages);
  config.number("kPace", constants.pace);
  config.number("kTurnRows", constants.turn_rows);
  config.number("kSumRegisters", constants.sum_registers);
  config.number("kKeyRegisters", constants.key_registers);
  config.number("kTurnRegisters", kTurnRegisters);
  config.number("kSharedBytes", static_cast<int>(backward_sm90_shared_bytes(constants)));
  config.flag("kVectorSums", true);
  config.flag("kLimitsKeys", constants.limits_keys);
  config.flag("kDeterministic", constants.deterministic);
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
  plan.section = backward_section(problem, machine, plan);
  plan.workspace = backward_regions(problem, around);
  plan.prediction = predict(padded_flops(work, problem, plan), work.fused_bytes,
                            machine.flops_per_second * kSm90BackwardReached, machine.bytes_per_second);
  return plan;
}

std::vector<Program> planned_backward_sm90_programs(const Machine& machine) {
  constexpr i32 kFp16At = 128;  // it differs by the names of instructions, and by what is kept of weights
  std::vector<Program> programs;
  if (machine.compute_capability != 90) return programs;
  const auto add = [&](BackwardSm90Constants rules, i32 width) {
    programs.push_back(backward_sm90_program(with_tiles(rules, width, width)));
  };
  for (const i32 width : {64, 128}) {
    for (const bool limits_keys : {false, true})
      for (const bool deterministic : {false, true}) {
        BackwardSm90Constants rules;
        rules.limits_keys = limits_keys;
        rules.deterministic = deterministic;
        add(rules, width);
      }
    BackwardSm90Constants all;
    all.limits_keys = all.natural = all.softcap = all.alibi = true;
    add(all, width);
  }
  BackwardSm90Constants half;
  half.element = Element::fp16;
  half.limits_keys = true;
  add(half, kFp16At);
  return programs;
}

}  // namespace narrows
