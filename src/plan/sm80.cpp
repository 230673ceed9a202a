#include "plan/sm80.hpp"

#include "plan/sm80_backward.hpp"
#include "plan/sm80_decode.hpp"
#include "plan/sm80_shared.hpp"
#include "shared/tile_order.h"

#include <algorithm>
#include <array>
#include <optional>

namespace narrows {
namespace {

using namespace sm80;

/// Tile sizes by the wider of the two head dims; of the rows of one width the first that fits the device's shared memory is
/// taken. Up to 256 columns, and 576 of 16 bits, the last one of a width fits every device.
struct Tiles {
  i32 element_bytes;
  i32 width;
  i32 query_block, key_block;
  i32 ruled_key_block;  // with a bias, which takes shared memory, or dropout, which takes registers
  i32 warps, resident_blocks;
  bool skips_rescale;  // at 128 columns: 4% of long calls, the more the longer; elsewhere nothing or -3%
};
constexpr std::array kTiles{
    Tiles{2, 32, 128, 128, 64, 4, 2, false}, Tiles{2, 32, 128, 64, 64, 4, 1, false},
    Tiles{2, 64, 128, 128, 64, 4, 2, false}, Tiles{2, 64, 128, 64, 64, 4, 2, false},
    Tiles{2, 64, 128, 64, 64, 4, 1, false},  Tiles{2, 96, 128, 64, 32, 4, 2, false},
    Tiles{2, 96, 128, 32, 32, 4, 2, false},  Tiles{2, 96, 128, 32, 32, 4, 1, false},
    Tiles{2, 128, 128, 64, 32, 4, 2, true},  Tiles{2, 128, 128, 32, 32, 4, 2, true},
    Tiles{2, 128, 128, 32, 32, 4, 1, true},  Tiles{2, 192, 128, 64, 64, 8, 1, false},
    Tiles{2, 192, 64, 32, 32, 4, 1, false},  Tiles{2, 256, 128, 64, 32, 8, 1, false},
    Tiles{2, 256, 64, 32, 32, 4, 1, false},  Tiles{2, 256, 64, 16, 16, 4, 1, false},
    Tiles{4, 32, 64, 64, 32, 4, 2, false},   Tiles{4, 64, 64, 64, 32, 4, 2, false},
    Tiles{4, 64, 64, 32, 32, 4, 2, false},   Tiles{4, 64, 64, 32, 32, 4, 1, false},
    Tiles{4, 96, 64, 32, 32, 4, 2, false},   Tiles{4, 96, 64, 32, 32, 4, 1, false},
    Tiles{4, 128, 64, 32, 32, 4, 2, false},  Tiles{4, 128, 64, 32, 32, 4, 1, false},
    Tiles{4, 128, 64, 16, 16, 4, 1, false},  Tiles{4, 192, 64, 16, 16, 4, 1, false},
    Tiles{4, 192, 32, 16, 16, 2, 1, false},  Tiles{4, 256, 64, 16, 16, 4, 1, false},
    Tiles{4, 256, 32, 16, 16, 2, 1, false},  Tiles{4, 256, 16, 16, 16, 1, 1, false},
    Tiles{2, 512, 64, 32, 16, 4, 1, false},  Tiles{2, 512, 64, 16, 16, 4, 1, false},
    Tiles{2, 512, 32, 16, 16, 2, 1, false},  Tiles{2, 576, 64, 32, 16, 4, 1, false},
    Tiles{2, 576, 64, 16, 16, 4, 1, false},  Tiles{2, 576, 32, 16, 16, 2, 1, false},
    Tiles{4, 512, 32, 16, 16, 2, 1, false},  Tiles{4, 512, 16, 16, 16, 1, 1, false},
    Tiles{4, 576, 32, 16, 16, 2, 1, false},  Tiles{4, 576, 16, 16, 16, 1, 1, false},
};

constexpr i64 kMostWidth = kWidths.back();
/// Columns of V that a thread block takes at most: a warp's accumulators of 16 rows of O are 128 registers then.
constexpr i32 kMostSlice = 256;

/// Of the largest matrix products' rate, what mma.sync and long sequences reach, measured on an H200 (compute capability 9.0);
/// elsewhere no such figure is known.
double reached(const Machine& machine) { return machine.compute_capability == 90 ? 0.36 : 1; }

/// What one copy may take: all of q, k, v and o are rows of such pieces.
int copy_bytes(const Problem& problem) {
  CopyBytes copy(problem.dtype);
  copy.narrow(problem.q, problem.head_dim);
  copy.narrow(problem.k, problem.head_dim);
  copy.narrow(problem.v, problem.value_dim);
  copy.narrow(problem.o, problem.value_dim);
  return copy.bytes();
}

/// rules: the rest of the program.
ForwardConstants with_tiles(ForwardConstants rules, const Tiles& tiles, Element element, i32 head_width,
                            i32 value_width) {
  ForwardConstants constants = rules;
  constants.element = element;
  constants.head_width = head_width;
  constants.value_width = std::min(value_width, kMostSlice);
  constants.value_slices = ceil_div(value_width, kMostSlice);
  constants.query_block = tiles.query_block;
  constants.key_block = rules.bias || rules.dropout ? tiles.ruled_key_block : tiles.key_block;
  constants.skips_rescale = tiles.skips_rescale;
  constants.warps = tiles.warps;
  constants.resident_blocks = tiles.resident_blocks;
  return constants;
}

/// The program that a call of these dtypes, head dims and rules takes; none where no row fits.
std::optional<ForwardConstants> tiled(const ForwardConstants& rules, DType dtype, i32 head_width, i32 value_width,
                                      i64 shared_bytes) {
  const i64 item = static_cast<i64>(item_size(dtype));
  for (const Tiles& tiles : kTiles) {
    if (tiles.element_bytes != item || tiles.width != std::max(head_width, value_width)) continue;
    ForwardConstants constants = with_tiles(rules, tiles, static_cast<Element>(dtype), head_width, value_width);
    constants.copy_bytes = item == 2 ? 2 : 16;  // what takes most: a call's layout chooses no tiles, and so no bits
    if (fits(forward_shared_bytes(constants), constants.resident_blocks, shared_bytes)) return constants;
  }
  return std::nullopt;
}

std::string refusal(const Problem& problem, const Machine& machine) {
  if (std::string reason = device_refusal(machine); !reason.empty()) return reason;
  return width_refusal(problem, kMostWidth);
}

std::string size_refusal(const Problem& problem, i64 blocks) {
  if (std::string reason = rows_refusal(problem); !reason.empty()) return reason;
  const bool varlen = problem.query_form == QueryForm::varlen;  // its blocks are those of all sequences
  return blocks_refusal("query rows", blocks,
                        varlen ? problem.heads : saturating_multiply(problem.batch, problem.heads));
}

}  // namespace

i64 forward_shared_bytes(const ForwardConstants& constants) {
  const i64 item = constants.element == Element::fp32 ? 4 : 2;
  const i64 queries = i64{constants.query_block} * constants.head_width;
  const i64 stage = i64{constants.key_block} * (constants.head_width + constants.value_width);
  // Shifted rows have one stage and, for the other, raw rows that are a unit longer.
  const i64 raw = constants.copy_bytes == 2 ? i64{constants.key_block} * 2 * 16 : 0;
  // A warp's rows of a bias and of a mask, as kernels/score_tile.cuh has them.
  const bool narrow_bias = constants.bias_element == Element::fp16 || constants.bias_element == Element::bf16;
  const auto scores = [&](i64 bytes) { return constants.query_block * std::max(constants.key_block * bytes, i64{64}); };
  const i64 beside = (constants.bias ? scores(narrow_bias ? 2 : 4) : 0) + (constants.mask ? scores(1) : 0);
  return raw + beside + item * std::max(queries + 2 * stage, i64{constants.query_block} * constants.value_width);
}

ForwardConstants forward_constants(const Problem& problem, const Plan& plan) {
  ForwardConstants constants = rules_of<ForwardConstants>(problem);
  constants.element = static_cast<Element>(problem.dtype);
  constants.head_width = static_cast<i32>(plan.head_width);
  constants.value_width = static_cast<i32>(plan.value_width);
  constants.value_slices = plan.value_slices;
  constants.query_block = static_cast<i32>(plan.query_block);
  constants.key_block = static_cast<i32>(plan.key_block);
  constants.warps = plan.warps;
  constants.copy_bytes = plan.copy_bytes;
  constants.resident_blocks = plan.resident_blocks;
  constants.skips_rescale = plan.skips_rescale;
  return constants;
}

Program forward_program(const ForwardConstants& constants) {
  Config config("shared/forward_args.h");
  config.tiles_and_rules(constants, 32 * constants.warps);
  config.number("kValueSlices", constants.value_slices);
  config.flag("kSkipsRescale", constants.skips_rescale);
  return {"forward_sm80.cu", "forward_sm80", config.text(), constants.element == Element::fp32};
}

std::variant<Plan, Refusal> consider_sm80(const Problem& problem, const Work& work, const Machine& machine) {
  if (problem.operation == Operation::backward) return consider_sm80_backward(problem, work, machine);
  if (decodes(problem)) return consider_sm80_decode(problem, work, machine);
  if (std::string reason = refusal(problem, machine); !reason.empty()) return reason;
  const i32 head_width = width_of(problem.head_dim), value_width = width_of(problem.value_dim);
  std::optional<ForwardConstants> constants =
      tiled(rules_of<ForwardConstants>(problem), problem.dtype, head_width, value_width, machine.shared_bytes);
  if (!constants) return text("no tiles fit ", machine.shared_bytes, " bytes of shared memory");
  constants->copy_bytes = copy_bytes(problem);

  const bool varlen = problem.query_form == QueryForm::varlen;
  const i64 blocks = varlen ? block_count(problem.query_rows, static_cast<i32>(problem.batch), constants->query_block)
                            : ceil_div<i64>(problem.query_rows, constants->query_block);
  if (std::string reason = size_refusal(problem, blocks * constants->value_slices); !reason.empty()) return reason;

  Plan plan;
  plan.family = "sm80";
  plan.head_width = head_width;
  plan.value_width = constants->value_width;
  plan.value_slices = constants->value_slices;
  plan.query_block = constants->query_block;
  plan.key_block = constants->key_block;
  plan.warps = constants->warps;
  plan.resident_blocks = constants->resident_blocks;
  plan.copy_bytes = constants->copy_bytes;
  plan.skips_rescale = constants->skips_rescale;
  plan.shared_bytes = forward_shared_bytes(*constants);
  plan.section = heads_together(problem, machine);
  const double rate = machine.flops_per_second * reached(machine) * (problem.dtype == DType::fp32 ? kFp32Rate : 1);
  plan.prediction = predict(work.flops, work.fused_bytes, rate, machine.bytes_per_second);
  return plan;
}

std::vector<Program> planned_forward_programs(const Machine& machine) {
  constexpr std::array kRules{&ForwardConstants::natural, &ForwardConstants::softcap, &ForwardConstants::alibi,
                              &ForwardConstants::bias,    &ForwardConstants::mask,    &ForwardConstants::dropout};
  constexpr i32 kEachRuleAt = 128;
  std::vector<Program> programs;
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    for (const i32 width : kWidths) {
      if (width > kMostSlice && (dtype == DType::fp16 || width != kWidths.back()))
        continue;  // one wide call is like the others
      const auto add = [&](ForwardConstants rules, int copy_bytes = 16) {
        rules.natural |= rules.softcap || rules.alibi || rules.bias;
        std::optional<ForwardConstants> constants =
            tiled(rules, dtype, width, std::min(width, kWidestValue), machine.shared_bytes);
        if (!constants) return;
        constants->copy_bytes = copy_bytes;
        programs.push_back(forward_program(*constants));
      };
      add({});
      ForwardConstants all;
      for (bool ForwardConstants::*rule : kRules) all.*rule = true;
      if (width <= kMostSlice || dtype == DType::bf16) add(all);
      if (width != kEachRuleAt) continue;
      for (bool ForwardConstants::*rule : kRules) {
        ForwardConstants one;
        one.*rule = true;
        add(one);
      }
      for (const int copy_bytes : {8, 4, 2, 0})
        if (copy_bytes != 2 || dtype != DType::fp32) add({}, copy_bytes);  // fp32 elements are never so far out of line
    }
  return programs;
}

}  // namespace narrows
