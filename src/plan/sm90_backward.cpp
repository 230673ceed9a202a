#include "plan/sm90_backward.hpp"

#include "plan/sm80_shared.hpp"
#include "plan/sm90_products.hpp"

#include <algorithm>
#include <array>

namespace narrows {
namespace {

constexpr i32 kKeyBlock = 128, kKeyWarps = 8, kThreads = 384;

struct Tiles {
  i32 width, query_block, stages, pace, sum_registers, key_registers;
};
constexpr std::array kTiles{Tiles{64, 64, 4, 80, 64, 216}, Tiles{128, 64, 3, 80, 64, 216}};

}  // namespace

BackwardSm90Constants backward_sm90_constants(i32 width, bool limits_keys, bool deterministic) {
  const Tiles& tiles =
      *std::find_if(kTiles.begin(), kTiles.end(), [&](const Tiles& row) { return row.width == width; });
  BackwardSm90Constants constants;
  constants.head_width = constants.value_width = width;
  constants.query_block = tiles.query_block;
  constants.key_block = kKeyBlock;
  constants.stages = tiles.stages;
  constants.pace = tiles.pace;
  constants.sum_registers = tiles.sum_registers;
  constants.key_registers = tiles.key_registers;
  constants.limits_keys = limits_keys;
  constants.deterministic = deterministic;
  return constants;
}

i64 backward_sm90_shared_bytes(const BackwardSm90Constants& constants) {
  constexpr i64 kItem = 2;
  const i64 row = kItem * (constants.head_width + constants.value_width), queries = constants.query_block;
  const i64 stage = queries * (row + static_cast<i64>(sizeof(RowFacts)));
  const i64 gradients = 2 * kItem * constants.key_block * queries;
  // What kernels/backward_pipeline_sm90.cuh keeps of the keys, and barriers; the kernel asserts that it is enough.
  const i64 facts = 256, barriers = 128;
  return constants.key_block * row + constants.stages * stage + gradients + facts + barriers;
}

Program backward_sm90_program(const BackwardSm90Constants& constants) {
  BackwardConstants common = around_backward_sm90(constants);
  common.warps = kKeyWarps;
  sm80::Config config("shared/backward_sm90_args.h");
  config.tiles_and_rules(common, kThreads);
  config.number("kColumnWarps", 1);
  config.number("kStages", constants.stages);
  config.number("kPace", constants.pace);
  config.number("kSumRegisters", constants.sum_registers);
  config.number("kKeyRegisters", constants.key_registers);
  config.number("kSharedBytes", static_cast<int>(backward_sm90_shared_bytes(constants)));
  config.flag("kVectorSums", true);
  config.flag("kLimitsKeys", constants.limits_keys);
  config.flag("kDeterministic", constants.deterministic);
  config.add(sm90::backward_products_text(constants.element, constants.query_block, constants.head_width,
                                          constants.value_width));
  return {"backward_sm90.cu", "backward_sm90", config.text()};
}

BackwardConstants around_backward_sm90(const BackwardSm90Constants& constants) {
  BackwardConstants around;
  around.element = constants.element;
  around.head_width = constants.head_width;
  around.value_width = constants.value_width;
  around.query_block = constants.query_block;
  around.key_block = constants.key_block;
  around.copy_bytes = 16;
  around.resident_blocks = 1;
  around.vector_sums = true;
  around.facts_apart = true;
  return around;
}

std::vector<Program> planned_backward_sm90_programs(const Machine& machine) {
  std::vector<Program> programs;
  if (machine.compute_capability != 90) return programs;
  for (const Tiles& tiles : kTiles)
    for (const bool limits_keys : {false, true})
      for (const bool deterministic : {false, true})
        programs.push_back(backward_sm90_program(backward_sm90_constants(tiles.width, limits_keys, deterministic)));
  return programs;
}

}  // namespace narrows
