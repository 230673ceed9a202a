#include "plan/sm80.hpp"

#include "core/error.hpp"
#include "shared/tile_order.h"

#include <algorithm>
#include <array>
#include <limits>
#include <optional>

namespace narrows {
namespace {

/// Tile sizes by the wider of the two head dims; of the rows of one width the first that fits the device's shared memory is
/// taken. The last one of a width fits every device.
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
};

/// Of a thread block, beside its tiles: what the system takes, the kernel's own facts, raw rows a unit longer than the tile's.
constexpr i64 kSharedBesideTiles = 2048 + 512;
constexpr i64 kSystemShared =
    1024;  // of a thread block; a multiprocessor has so much more than one thread block may take

/// Head dims as they lie on chip.
constexpr std::array<i32, 6> kWidths{32, 64, 96, 128, 192, 256};
constexpr i64 kMostWidth = kWidths.back();

i32 width_of(i64 head_dim) {
  return *std::find_if(kWidths.begin(), kWidths.end(), [&](i32 width) { return width >= head_dim; });
}

/// Of the largest matrix products' rate, what mma.sync and long sequences reach, measured on an H200 (compute capability 9.0);
/// elsewhere no such figure is known.
double reached(const Machine& machine) { return machine.compute_capability == 90 ? 0.36 : 1; }
/// fp32 is three products of tf32, each at half the rate.
constexpr double kFp32Rate = 1.0 / 6;

/// K and V of the heads worked on together take so much of L2.
constexpr double kSectionOfL2 = 0.64;

/// What one copy may take: all of q, k, v and o are rows of such pieces.
int copy_bytes(const Problem& problem) {
  const i64 item = static_cast<i64>(item_size(problem.dtype));
  int bytes = 16;
  const auto narrow = [&](const Layout& layout, i64 columns) {
    if (layout.elements == 0 || bytes == 0) return;
    bytes = layout.unit_last ? std::min(bytes, layout.alignment) : 0;
    while (bytes && columns * item % bytes != 0) bytes /= 2;
  };
  narrow(problem.q, problem.head_dim);
  narrow(problem.k, problem.head_dim);
  narrow(problem.v, problem.value_dim);
  narrow(problem.o, problem.value_dim);
  return bytes;
}

bool limits_keys(const Mask& mask) { return mask.left < kUnlimited || mask.right < kUnlimited || mask.chunk != 0; }

/// What a problem's rules make of a program.
ForwardConstants rules_of(const Problem& problem) {
  ForwardConstants constants;
  constants.bias = problem.bias.given;
  constants.bias_element = constants.bias ? static_cast<Element>(problem.bias_dtype) : Element::fp32;
  constants.softcap = problem.rules.softcap != 0;
  constants.alibi = problem.alibi_slopes.given;
  constants.natural = constants.softcap || constants.alibi || constants.bias || problem.rules.scale <= 0;
  constants.mask = problem.mask.given;
  constants.dropout = problem.rules.dropout > 0;
  return constants;
}

/// rules: the rest of the program.
ForwardConstants with_tiles(ForwardConstants rules, const Tiles& tiles, Element element, i32 head_width,
                            i32 value_width) {
  ForwardConstants constants = rules;
  constants.element = element;
  constants.head_width = head_width;
  constants.value_width = value_width;
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
    const i64 bytes = constants.resident_blocks * (forward_shared_bytes(constants) + kSharedBesideTiles);
    if (bytes <= shared_bytes + kSystemShared) return constants;
  }
  return std::nullopt;
}

std::string refusal(const Problem& problem, const Machine& machine) {
  if (problem.operation != Operation::forward) return "has no backward kernel";
  if (machine.compute_capability < 80)
    return text("needs compute capability 8.0, the device has ", machine.compute_capability / 10, ".",
                machine.compute_capability % 10);
  if (problem.key_form == KeyForm::cache || problem.key_form == KeyForm::pages) return "does not read KV caches";
  if (std::max(problem.head_dim, problem.value_dim) > kMostWidth)
    return text("takes head dims up to ", kMostWidth, ", not d=", problem.head_dim, " dv=", problem.value_dim);
  if (problem.num_splits > 1) return text("does not split keys, num_splits=", problem.num_splits);
  return "";
}

/// Numbers of rows, heads and thread blocks are 32-bit there.
std::string size_refusal(const Problem& problem, i64 blocks) {
  constexpr i64 kMost = std::numeric_limits<i32>::max() - 1024;
  const bool varlen = problem.query_form == QueryForm::varlen;  // its blocks are those of all sequences
  const i64 pairs = varlen ? problem.heads : saturating_multiply(problem.batch, problem.heads);
  if (std::max(problem.query_rows, problem.key_rows) > kMost) return text("takes up to ", kMost, " rows of a tensor");
  if (pairs > kMost || saturating_multiply(blocks, pairs) > kMost)
    return text("takes up to ", kMost, " blocks of query rows, not ", blocks, " of ", pairs, " heads");
  return "";
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
  ForwardConstants constants = rules_of(problem);
  constants.element = static_cast<Element>(problem.dtype);
  constants.head_width = static_cast<i32>(plan.head_width);
  constants.value_width = static_cast<i32>(plan.value_width);
  constants.query_block = static_cast<i32>(plan.query_block);
  constants.key_block = static_cast<i32>(plan.key_block);
  constants.warps = plan.warps;
  constants.copy_bytes = plan.copy_bytes;
  constants.resident_blocks = plan.resident_blocks;
  constants.skips_rescale = plan.skips_rescale;
  return constants;
}

Program forward_program(const ForwardConstants& constants) {
  constexpr std::array<std::string_view, 4> kElements{"fp16", "bf16", "fp32", "fp64"};
  std::string config = "#pragma once\n#include \"shared/forward_args.h\"\nnamespace narrows {\n";
  const auto element = [&](std::string_view name, Element value) {
    config += text("constexpr Element ", name, " = Element::", kElements[static_cast<std::size_t>(value)], ";\n");
  };
  const auto number = [&](std::string_view name, int value) {
    config += text("constexpr int ", name, " = ", value, ";\n");
  };
  const auto flag = [&](std::string_view name, bool value) {
    config += text("constexpr bool ", name, " = ", value ? "true" : "false", ";\n");
  };
  element("kElement", constants.element);
  element("kBiasElement", constants.bias_element);
  number("kHeadDim", constants.head_width);
  number("kValueDim", constants.value_width);
  number("kBlockQueries", constants.query_block);
  number("kBlockKeys", constants.key_block);
  number("kWarps", constants.warps);
  number("kThreads", 32 * constants.warps);
  number("kBlocksOfMultiprocessor", constants.resident_blocks);
  number("kCopyBytes", constants.copy_bytes);
  flag("kSkipsRescale", constants.skips_rescale);
  flag("kNatural", constants.natural);
  flag("kSoftcap", constants.softcap);
  flag("kAlibi", constants.alibi);
  flag("kBias", constants.bias);
  flag("kMask", constants.mask);
  flag("kDropout", constants.dropout);
  return {"forward_sm80.cu", "forward_sm80", config + "}\n", constants.element == Element::fp32};
}

std::variant<Plan, Refusal> consider_sm80(const Problem& problem, const Work& work, const Machine& machine) {
  if (std::string reason = refusal(problem, machine); !reason.empty()) return reason;
  const i32 head_width = width_of(problem.head_dim), value_width = width_of(problem.value_dim);
  std::optional<ForwardConstants> constants =
      tiled(rules_of(problem), problem.dtype, head_width, value_width, machine.shared_bytes);
  if (!constants) return text("no tiles fit ", machine.shared_bytes, " bytes of shared memory");
  constants->copy_bytes = copy_bytes(problem);

  const bool varlen = problem.query_form == QueryForm::varlen;
  const i64 blocks = varlen ? block_count(problem.query_rows, static_cast<i32>(problem.batch), constants->query_block)
                            : ceil_div<i64>(problem.query_rows, constants->query_block);
  if (std::string reason = size_refusal(problem, blocks); !reason.empty()) return reason;

  Plan plan;
  plan.family = "sm80";
  plan.head_width = head_width;
  plan.value_width = value_width;
  plan.query_block = constants->query_block;
  plan.key_block = constants->key_block;
  plan.warps = constants->warps;
  plan.resident_blocks = constants->resident_blocks;
  plan.copy_bytes = constants->copy_bytes;
  plan.skips_rescale = constants->skips_rescale;
  plan.shared_bytes = forward_shared_bytes(*constants);
  if (limits_keys(problem.rules.mask) && problem.max_keys > 0) {
    const i64 item = static_cast<i64>(item_size(problem.dtype));
    const double head = static_cast<double>(problem.max_keys * (problem.head_dim + problem.value_dim) * item);
    const i64 kv_heads =
        std::max<i64>(1, static_cast<i64>(kSectionOfL2 * static_cast<double>(machine.l2_bytes) / head));
    const i64 pairs = varlen ? problem.heads : problem.batch * problem.heads;
    plan.section = std::clamp<i64>(saturating_multiply(kv_heads, problem.group()), 1, std::max<i64>(pairs, 1));
  }
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
      const auto add = [&](ForwardConstants rules, int copy_bytes = 16) {
        rules.natural |= rules.softcap || rules.alibi || rules.bias;
        std::optional<ForwardConstants> constants = tiled(rules, dtype, width, width, machine.shared_bytes);
        if (!constants) return;
        constants->copy_bytes = copy_bytes;
        programs.push_back(forward_program(*constants));
      };
      add({});
      ForwardConstants all;
      for (bool ForwardConstants::*rule : kRules) all.*rule = true;
      add(all);
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
