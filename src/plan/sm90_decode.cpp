#include "plan/sm90_decode.hpp"

#include "plan/scratch.hpp"
#include "plan/sm80_shared.hpp"
#include "plan/sm90_products.hpp"
#include "plan/sm90_shared.hpp"

#include <algorithm>

namespace narrows {
namespace {

using namespace sm80;

constexpr i32 kRows = 64, kKeys = 64;  // packed rows of a thread block, keys of a tile
constexpr i32 kComputeWarps = 8, kBringWarps = 4, kStages = 2;
constexpr i32 kMostParts = 240;  // of a row, whose weights take the place of Q's tile
/// What a call takes beside its keys, more than with decode_sm80.cu: 22.2 us instead of 19.8 with 1024 keys on an H200.
constexpr double kMoreBesideKeys = 2.4e-6;  // seconds
constexpr i32 kWidestHead = 576;

i64 shared_bytes(const DecodeConstants& constants) {
  const auto tile = [](i64 rows, i64 columns) { return 2 * rows * round_up(columns, 64); };
  const i64 stage = tile(kKeys, std::max(constants.head_width, constants.value_width));
  // What kernels/decode_tiles_sm90.cuh keeps beside the tiles; the kernel asserts that it is enough.
  constexpr i64 kBeside = 2048;
  return tile(kRows, constants.head_width) + kStages * stage + tile(kRows, kKeys) + kBeside;
}

/// Values of a single kv head that are narrower than its keys are taken to be a part of them, which the device will see.
i64 bytes_read(const Problem& problem, const Work& work) {
  if (problem.kv_heads != 1 || problem.value_dim >= problem.head_dim) return work.fused_bytes;
  return work.fused_bytes / (problem.head_dim + problem.value_dim) * problem.head_dim;
}

std::string wide_decode_refusal(const Problem& problem, const Machine& machine) {
  if (std::string reason = sm90::device_refusal(machine); !reason.empty()) return reason;
  if (std::string reason = sm90::dtype_refusal(problem); !reason.empty()) return reason;
  const auto fits = [](i64 width, i64 widest) { return width % sm90::kUnitColumns == 0 && width <= widest; };
  if (!fits(problem.head_dim, kWidestHead) || !fits(problem.value_dim, kWidestValue))
    return text("decodes head dims that are multiples of ", sm90::kUnitColumns, " up to d=", kWidestHead,
                " dv=", kWidestValue, ", not d=", problem.head_dim, " dv=", problem.value_dim);
  if (problem.bias.given) return "has no bias";
  if (problem.mask.given) return "has no mask";
  if (problem.rules.dropout > 0) return "has no dropout";
  if (problem.batch_invariant) return "does not read every layout, as batch_invariant asks of one kernel";
  CopyBytes copy(problem.dtype);
  copy.narrow(problem.q, problem.head_dim);
  copy.narrow(problem.k, problem.head_dim);
  copy.narrow(problem.v, problem.value_dim);
  if (copy.bytes() != 16) return "needs q, k and v with adjoining columns, and rows at multiples of 16 bytes";
  return decode_size_refusal(problem, kRows, kKeys);
}

}  // namespace

Program decode_sm90_program(const DecodeConstants& constants) {
  Config config("shared/decode_args.h");
  config.tiles_and_rules(constants, 32 * constants.warps);
  config.flag("kTurnsQueries", constants.turned);
  config.number("kStages", kStages);
  config.number("kMostParts", kMostParts);
  config.number("kSharedBytes", static_cast<int>(shared_bytes(constants)));
  config.add(sm90::products_text(constants.element, constants.key_block, constants.value_width / 2));
  return {"decode_sm90.cu", "decode_sm90", config.text(), false, true};
}

std::variant<Plan, Refusal> consider_sm90_decode(const Problem& problem, const Work& work, const Machine& machine) {
  if (std::string reason = wide_decode_refusal(problem, machine); !reason.empty()) return reason;
  Plan plan;
  plan.family = "sm90";
  plan.decodes = true;
  plan.head_width = std::max(width_of(problem.head_dim), kWidestValue);
  plan.value_width = kWidestValue;
  plan.query_block = kRows;
  plan.key_block = kKeys;
  plan.warps = kComputeWarps + kBringWarps;
  plan.resident_blocks = 1;
  plan.copy_bytes = 16;
  plan.shared_bytes = shared_bytes(decode_constants(problem, plan));
  plan.blocks = std::clamp(machine.multiprocessors, 1, kMostParts);
  share_out(plan, problem, plan.value_width, kMostParts);
  plan.prediction = predict(work.flops, bytes_read(problem, work), machine.flops_per_second, machine.bytes_per_second);
  if (plan.prediction.seconds > 0) plan.prediction.seconds += kMoreBesideKeys;
  return plan;
}

std::vector<Program> planned_decode_sm90_programs(const Machine& machine) {
  std::vector<Program> programs;
  if (machine.compute_capability != 90) return programs;
  const auto add = [&](Element element, i32 head_width, bool ruled) {
    DecodeConstants constants;
    constants.element = element;
    constants.head_width = head_width;
    constants.value_width = kWidestValue;
    constants.query_block = kRows;
    constants.key_block = kKeys;
    constants.warps = kComputeWarps + kBringWarps;
    constants.copy_bytes = 16;
    constants.resident_blocks = 1;
    constants.natural = constants.softcap = constants.alibi = ruled;
    programs.push_back(decode_sm90_program(constants));
  };
  add(Element::bf16, kWidestHead, false);
  add(Element::bf16, kWidestHead, true);
  add(Element::bf16, kWidestValue, false);
  add(Element::fp16, kWidestHead, false);
  return programs;
}

}  // namespace narrows
