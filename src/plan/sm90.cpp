#include "plan/sm90.hpp"

#include "plan/scratch.hpp"
#include "plan/sm80.hpp"
#include "plan/sm80_shared.hpp"
#include "plan/sm90_backward.hpp"
#include "plan/sm90_decode.hpp"
#include "plan/sm90_products.hpp"
#include "plan/sm90_shared.hpp"
#include "shared/tile_order.h"

#include <algorithm>
#include <array>
#include <numeric>

namespace narrows {
namespace {

using namespace sm80;

constexpr std::array<i32, 5> kSm90Widths{64, 96, 128, 192, 256};  // head dims as they lie on chip
constexpr i32 kPartRows = 64;                                     // of a warpgroup
constexpr i64 kMostOutputColumns = 128;                           // that leave together through a tile of O's own
constexpr i64 kSwizzledRows = 8;   // of a tile, after which its swizzle repeats: a box begins at a multiple of them
constexpr i64 kLeastBoxRows = 16;  // boxes of 8 took 1.04 to 1.11 of gathering's time

/// The first row of a width that takes a call's rules and lengths is its own.
struct Sm90Tiles {
  i32 width;                  // the wider of the two head dims
  bool limits_keys, natural;  // takes masks; takes softcap, ALiBi and scales of 0 and less
  KeyForm keys;    // in this form or one before it: more than two warpgroups leave no registers to find them in a cache
  i64 least_keys;  // of the longest sequence
  i32 warpgroups, key_block, stages, query_stages, fact_slots;
  bool queries_in_registers, own_output_tile, takes_turns;
  i32 tiles_before_wait;
  i32 bring_registers, compute_registers;
};
constexpr std::array kSm90Tiles{
    Sm90Tiles{64, false, false, KeyForm::varlen, 0, 3, 128, 2, 2, 2, false, true, true, -1, 32, 160},
    Sm90Tiles{64, true, false, KeyForm::varlen, 2048, 3, 128, 2, 2, 2, false, true, true, -1, 32, 160},
    Sm90Tiles{64, true, false, KeyForm::varlen, 0, 4, 64, 4, 2, 4, false, true, false, -1, 32, 112},
    Sm90Tiles{64, true, false, KeyForm::pages, 0, 2, 128, 2, 1, 2, true, true, true, -1, 40, 232},
    Sm90Tiles{64, true, true, KeyForm::pages, 0, 2, 128, 2, 1, 2, true, true, true, 3, 40, 232},
    Sm90Tiles{96, false, false, KeyForm::varlen, 0, 3, 96, 2, 1, 2, false, true, true, -1, 32, 160},
    Sm90Tiles{96, true, false, KeyForm::pages, 0, 2, 128, 2, 1, 2, true, true, true, -1, 40, 232},
    Sm90Tiles{96, true, true, KeyForm::pages, 0, 2, 128, 2, 1, 2, false, true, true, 3, 40, 232},
    Sm90Tiles{128, false, false, KeyForm::pages, 0, 2, 128, 2, 1, 2, true, true, true, -1, 40, 232},
    Sm90Tiles{128, true, false, KeyForm::pages, 1024, 2, 128, 2, 1, 2, true, true, true, -1, 40, 232},
    Sm90Tiles{128, true, false, KeyForm::pages, 0, 2, 128, 2, 1, 3, true, true, true, -1, 40, 232},
    Sm90Tiles{128, true, true, KeyForm::pages, 0, 2, 128, 2, 1, 2, false, true, true, 3, 40, 232},
    Sm90Tiles{192, true, false, KeyForm::pages, 0, 2, 112, 2, 1, 2, false, false, true, 2, 40, 232},
    Sm90Tiles{192, true, true, KeyForm::pages, 0, 2, 80, 2, 1, 2, false, false, true, 2, 40, 232},
    Sm90Tiles{256, false, false, KeyForm::cache, 1024, 2, 80, 2, 1, 2, false, false, true, 2, 40, 232},
    Sm90Tiles{256, false, false, KeyForm::varlen, 0, 2, 64, 2, 1, 2, false, true, true, 2, 40, 232},
    Sm90Tiles{256, true, false, KeyForm::cache, 2048, 2, 80, 2, 1, 2, false, false, true, 2, 40, 232},
    Sm90Tiles{256, true, false, KeyForm::varlen, 0, 2, 64, 2, 1, 2, false, true, true, 2, 40, 232},
    Sm90Tiles{256, true, false, KeyForm::pages, 0, 2, 64, 2, 1, 2, false, false, true, 2, 40, 232},
    Sm90Tiles{256, true, true, KeyForm::pages, 0, 2, 48, 2, 1, 2, false, false, true, 2, 40, 232},
};

constexpr i64 kHeadsInTurn = 12;         // 4 were 3% faster at 256 columns and 512 keys, up to 1.4% slower elsewhere
constexpr i64 kLeastKeysToCount = 2048;  // measured below

/// Of the largest matrix products' rate, what long sequences reach, measured on an H200.
constexpr double kReached = 0.64;

constexpr i64 chunked_bytes(i64 rows, i64 columns) { return rows * ceil_div<i64>(columns, 64) * 128; }

}  // namespace

namespace sm90 {

std::string device_refusal(const Machine& machine) {
  if (machine.compute_capability == 90) return "";
  return text("needs compute capability 9.0, the device has ", machine.compute_capability / 10, ".",
              machine.compute_capability % 10);
}

std::string dtype_refusal(const Problem& problem) {
  if (problem.dtype == DType::bf16 || problem.dtype == DType::fp16) return "";
  return text("takes bf16 and fp16, not ", problem.dtype);
}

std::string head_dim_refusal(const Problem& problem, i64 widest) {
  const auto fits = [&](i64 width) { return width % kUnitColumns == 0 && width <= widest; };
  if (fits(problem.head_dim) && fits(problem.value_dim)) return "";
  return text("takes head dims that are multiples of ", kUnitColumns, " up to ", widest, ", not d=", problem.head_dim,
              " dv=", problem.value_dim);
}

std::string rules_refusal(const Problem& problem) {
  const Rules& rules = problem.rules;
  if (problem.bias.given) return "has no bias";
  if (problem.mask.given) return "has no mask";
  if (rules.dropout > 0) return "has no dropout";
  if (rules.key_begin || rules.key_end) return "has no key_begin and key_end";
  if (problem.num_splits > 1) return text("does not split keys, num_splits=", problem.num_splits);
  if (problem.batch_invariant) return "does not read every layout, as batch_invariant asks of one kernel";
  return "";
}

std::string layout_refusal(std::string_view name, const Layout& layout) {
  if (layout.elements == 0) return "";
  if (!layout.unit_last || layout.alignment < kUnitBytes)
    return text("needs ", name, " with adjoining columns, and rows at multiples of ", kUnitBytes, " bytes");
  if (layout.expanded) return text("reads no expanded ", name);
  if (!layout.near_strides) return text("needs strides of ", name, " above 0 and below 2^40 bytes");
  return "";
}

}  // namespace sm90

namespace {

using sm90::kUnitBytes;

bool is_cached(const Problem& problem) {
  return problem.key_form == KeyForm::cache || problem.key_form == KeyForm::pages;
}

std::string cache_refusal(const Problem& problem) {
  if (problem.rotary_pairs) return "turns no queries by their positions";
  if (problem.capacity == 0 || problem.key_batches == 0) return "needs a key";
  if (std::max({problem.capacity, problem.key_batches, problem.cache_rows}) > kMostBlocks)
    return text("takes caches of up to ", kMostBlocks, " slots, rows and pages");
  return "";
}

std::string sm90_refusal(const Problem& problem, const Machine& machine) {
  if (std::string reason = sm90::device_refusal(machine); !reason.empty()) return reason;
  if (std::string reason = sm90::dtype_refusal(problem); !reason.empty()) return reason;
  if (std::string reason = sm90::head_dim_refusal(problem, kSm90Widths.back()); !reason.empty()) return reason;
  if (std::string reason = sm90::rules_refusal(problem); !reason.empty()) return reason;
  for (const auto& [name, layout] :
       {std::pair{"q", &problem.q}, std::pair{"k", &problem.k}, std::pair{"v", &problem.v}, std::pair{"o", &problem.o}})
    if (std::string reason = sm90::layout_refusal(name, *layout); !reason.empty()) return reason;
  // The copy engine knows no empty tensors, and packed rows without a sequence have tiles all the same.
  if (problem.key_rows == 0 || (problem.key_batches == 0 && problem.query_form == QueryForm::varlen))
    return "needs a key";
  if (is_cached(problem))
    if (std::string reason = cache_refusal(problem); !reason.empty()) return reason;
  return rows_refusal(problem);
}

i32 sm90_width(i64 head_dim) {
  return *std::find_if(kSm90Widths.begin(), kSm90Widths.end(), [&](i32 width) { return width >= head_dim; });
}

ForwardSm90Constants with_tiles(ForwardSm90Constants rules, const Sm90Tiles& tiles, Element element, i32 head_width,
                                i32 value_width) {
  ForwardSm90Constants constants = rules;
  constants.element = element;
  constants.head_width = head_width;
  constants.value_width = value_width;
  constants.query_block = kPartRows * tiles.warpgroups;
  constants.key_block = tiles.key_block;
  constants.warps = 4 * tiles.warpgroups;
  constants.stages = tiles.stages;
  constants.query_stages = tiles.query_stages;
  constants.fact_slots = tiles.fact_slots;
  constants.bring_registers = tiles.bring_registers;
  constants.compute_registers = tiles.compute_registers;
  constants.tiles_before_wait = tiles.tiles_before_wait;
  constants.queries_in_registers = tiles.queries_in_registers;
  constants.own_output_tile = tiles.own_output_tile;
  constants.takes_turns = tiles.takes_turns;
  return constants;
}

/// Who finds keys in a cache takes more registers than who finds those of the call; at 256 columns and 80 keys no product has any to
/// spare.
ForwardSm90Constants over_cache(ForwardSm90Constants constants, bool gathers) {
  constants.cached = true;
  constants.gathers = gathers;
  const bool widest = std::max(constants.head_width, constants.value_width) == kSm90Widths.back();
  if (!widest || constants.key_block <= 64) {
    constants.bring_registers = 56;
    constants.compute_registers = 224;
  }
  return constants;
}

ForwardSm90Constants sm90_rules(const Problem& problem) {
  const auto common = rules_of<ForwardConstants>(problem);
  ForwardSm90Constants constants;
  constants.limits_keys = limits_keys(problem.rules);
  constants.natural = common.natural;
  constants.softcap = common.softcap;
  constants.alibi = common.alibi;
  return constants;
}

const Sm90Tiles& tiles_of(i32 width, const ForwardSm90Constants& rules, KeyForm form, i64 keys) {
  return *std::find_if(kSm90Tiles.begin(), kSm90Tiles.end(), [&](const Sm90Tiles& tiles) {
    return tiles.width == width && tiles.limits_keys >= rules.limits_keys && tiles.natural >= rules.natural &&
           tiles.keys >= form && tiles.least_keys <= keys;
  });
}

/// Whether tiles of different lengths can be dealt out in turn: nothing is cleared before the kernel, and nobody waits for a counter.
/// Among the tiles of kHeadsInTurn heads at a time, a thread block then comes to each block of rows equally often.
bool deals_in_turn(const Problem& problem, i64 tiles, i64 query_block, i64 thread_blocks) {
  if (problem.lengths_on_device || problem.max_keys >= kLeastKeysToCount || tiles <= thread_blocks) return false;
  const i64 section = kHeadsInTurn * ceil_div(problem.query_rows, query_block);
  const i64 common = std::gcd(section, thread_blocks);
  return kHeadsInTurn % common == 0 && ceil_div(tiles, thread_blocks) >= section / common;
}

/// Products that are computed, of rows that there are not and by multiprocessors that wait for the last tiles too, by those of the
/// call. Decides between this kernel and the one that packs few query rows.
double products_by_rows(const Problem& problem, const Machine& machine, i64 tiles, i64 query_block) {
  const i64 sequences = problem.query_form == QueryForm::varlen ? 1 : problem.batch;
  const i64 rows = saturating_multiply(saturating_multiply(sequences, problem.heads), problem.query_rows);
  const i64 at_once = std::max(machine.multiprocessors, 1);
  return static_cast<double>(ceil_div(tiles, at_once) * at_once) * static_cast<double>(query_block) /
         static_cast<double>(std::max<i64>(rows, 1));
}

}  // namespace

i64 forward_sm90_shared_bytes(const ForwardSm90Constants& constants) {
  const i64 parts = constants.query_block / kPartRows;
  const i64 queries = chunked_bytes(kPartRows, constants.head_width);
  const i64 output = chunked_bytes(kPartRows, constants.value_width);
  const i64 piece = chunked_bytes(kPartRows, kMostOutputColumns);
  const i64 results = constants.own_output_tile ? constants.query_stages * queries + std::min(output, piece)
                                                : std::max(queries, output);
  const i64 stage = chunked_bytes(constants.key_block, constants.head_width) +
                    chunked_bytes(constants.key_block, constants.value_width);
  // What kernels/tile_facts.cuh keeps of tiles, and barriers; the kernel asserts that it is enough.
  const i64 rows = constants.limits_keys ? constants.query_block : 0;
  const i64 facts = constants.fact_slots * (136 + 16 * parts) + 8 * rows + 56 * constants.warps, barriers = 336;
  return parts * results + constants.stages * stage + facts + barriers;
}

ForwardSm90Constants forward_sm90_constants(const Problem& problem) {
  const i32 head_width = sm90_width(problem.head_dim), value_width = sm90_width(problem.value_dim);
  const ForwardSm90Constants rules = sm90_rules(problem);
  const Sm90Tiles& tiles = tiles_of(std::max(head_width, value_width), rules, problem.key_form, problem.max_keys);
  const ForwardSm90Constants constants =
      with_tiles(rules, tiles, static_cast<Element>(problem.dtype), head_width, value_width);
  if (!is_cached(problem)) return constants;
  return over_cache(constants, forward_sm90_box_rows(problem, constants.key_block) == 0);
}

i32 forward_sm90_box_rows(const Problem& problem, i32 key_block) {
  if (problem.key_form != KeyForm::pages) return key_block;
  if (problem.padded) return 0;  // tiles begin anywhere in a page
  const i64 rows = std::gcd(problem.page_size, i64{key_block});
  return rows % kSwizzledRows == 0 && rows >= kLeastBoxRows ? static_cast<i32>(rows) : 0;
}

Program forward_sm90_program(const ForwardSm90Constants& constants) {
  ForwardConstants common;  // what the headers that it shares with family sm80 ask for
  common.element = constants.element;
  common.head_width = constants.head_width;
  common.value_width = constants.value_width;
  common.query_block = constants.query_block;
  common.key_block = constants.key_block;
  common.warps = constants.warps;
  common.copy_bytes = kUnitBytes;
  common.resident_blocks = 1;
  common.natural = constants.natural;
  common.softcap = constants.softcap;
  common.alibi = constants.alibi;
  Config config("shared/forward_sm90_args.h");
  config.tiles_and_rules(common, 32 * (constants.warps + 4));
  config.number("kWarpgroups", constants.warps / 4);
  config.number("kStages", constants.stages);
  config.number("kQueryStages", constants.query_stages);
  config.number("kFactSlots", constants.fact_slots);
  config.number("kTilesBeforeWait", constants.tiles_before_wait);
  config.number("kBringRegisters", constants.bring_registers);
  config.number("kComputeRegisters", constants.compute_registers);
  config.number("kSharedBytes", static_cast<int>(forward_sm90_shared_bytes(constants)));
  config.flag("kLimitsKeys", constants.limits_keys);
  config.flag("kQueriesInRegisters", constants.queries_in_registers);
  config.flag("kOwnOutputTile", constants.own_output_tile);
  config.flag("kTakesTurns", constants.takes_turns);
  config.flag("kCached", constants.cached);
  config.flag("kGathers", constants.gathers);
  config.add(sm90::products_text(constants.element, constants.key_block, constants.value_width));
  return {"forward_sm90.cu", "forward_sm90", config.text()};
}

i64 forward_sm90_tiles(const Problem& problem, i64 query_block) {
  const bool varlen = problem.query_form == QueryForm::varlen;
  const i64 pairs = varlen ? problem.heads : saturating_multiply(problem.batch, problem.heads);
  const i64 blocks =
      varlen ? block_count(problem.query_rows, static_cast<i32>(problem.batch), static_cast<i32>(query_block))
             : ceil_div(problem.query_rows, query_block);
  return saturating_multiply(blocks, pairs);
}

std::variant<Plan, Refusal> consider_sm90(const Problem& problem, const Work& work, const Machine& machine) {
  if (problem.operation == Operation::backward) return consider_sm90_backward(problem, work, machine);
  if (decodes_wide(problem)) return consider_sm90_decode(problem, work, machine);
  if (std::string reason = sm90_refusal(problem, machine); !reason.empty()) return reason;
  const ForwardSm90Constants constants = forward_sm90_constants(problem);
  const i64 tiles = forward_sm90_tiles(problem, constants.query_block);
  if (tiles > kMostBlocks) return text("takes up to ", kMostBlocks, " blocks of query rows, not ", tiles);

  Plan plan;
  plan.family = "sm90";
  plan.head_width = constants.head_width;
  plan.value_width = constants.value_width;
  plan.query_block = constants.query_block;
  plan.key_block = constants.key_block;
  plan.warps = constants.warps;
  plan.resident_blocks = 1;
  plan.copy_bytes = kUnitBytes;
  plan.thread_blocks = static_cast<int>(std::min<i64>(tiles, machine.multiprocessors));
  plan.shared_bytes = forward_sm90_shared_bytes(constants);
  const bool uneven = constants.limits_keys || problem.lengths_on_device;
  const bool in_turn = !uneven || deals_in_turn(problem, tiles, plan.query_block, plan.thread_blocks);
  plan.section = uneven && in_turn ? kHeadsInTurn : heads_together(problem, machine);
  const bool marks = problem.appends && problem.key_form == KeyForm::pages;
  plan.workspace = {{"tiles taken", !in_turn && tiles > plan.thread_blocks ? kScratchAlignment : 0},
                    {"sequences refused", marks ? aligned_bytes(saturating_multiply(problem.batch, 4)) : 0}};
  if (problem.appends) plan.blocks = machine.multiprocessors;
  const double flops =
      constants.cached ? work.flops * products_by_rows(problem, machine, tiles, plan.query_block) : work.flops;
  plan.prediction = predict(flops, work.fused_bytes, machine.flops_per_second * kReached, machine.bytes_per_second);
  return plan;
}

std::vector<Program> planned_forward_sm90_programs(const Machine& machine) {
  constexpr i32 kFp16At = 128;  // it differs by the names of instructions alone
  std::vector<Program> programs;
  if (machine.compute_capability != 90) return programs;
  for (const Element element : {Element::bf16, Element::fp16})
    for (const Sm90Tiles& tiles : kSm90Tiles) {
      if (element == Element::fp16 && tiles.width != kFp16At) continue;
      const auto is_taken = [&](const ForwardSm90Constants& rules, KeyForm form) {
        return &tiles_of(tiles.width, rules, form, tiles.least_keys) == &tiles;
      };
      ForwardSm90Constants rules;
      rules.natural = tiles.natural;
      const auto constants = [&] { return with_tiles(rules, tiles, element, tiles.width, tiles.width); };
      for (const bool limits_keys : {false, true}) {
        rules.limits_keys = limits_keys;
        rules.softcap = rules.alibi = tiles.natural && limits_keys;
        if (is_taken(rules, KeyForm::dense)) programs.push_back(forward_sm90_program(constants()));
      }
      const bool pages = tiles.keys == KeyForm::pages;
      if (element != Element::bf16 || tiles.natural || tiles.keys < KeyForm::cache) continue;
      if ((pages && tiles.least_keys != 0) || !is_taken(rules, tiles.keys)) continue;
      programs.push_back(forward_sm90_program(over_cache(constants(), false)));
      if (pages) programs.push_back(forward_sm90_program(over_cache(constants(), true)));
    }
  return programs;
}

}  // namespace narrows
