#include "plan/sm80_decode.hpp"

#include "plan/scratch.hpp"
#include "plan/sm80_shared.hpp"
#include "shared/decode_line.h"

#include <algorithm>
#include <array>
#include <optional>

namespace narrows {
namespace {

using namespace sm80;

/// What a call takes its warps for.
enum class Use : unsigned char {
  few,   // rows of which every multiprocessor has a piece of its own, with a tile for each of its warps
  many,  // rows whose pieces fill three thread blocks of each multiprocessor, in as many registers as these leave
  any,
};

/// By the wider of the two head dims; the first row that is for the call is taken. Thread blocks of more warps end a row sooner,
/// more thread blocks keep memory busier while one of them ends a row.
struct DecodeTiles {
  i32 element_bytes;
  i32 most_width;
  i32 packed_rows;
  Use use;
  i32 warps, resident_blocks;
  bool wide;
};
constexpr std::array kDecodeTiles{
    DecodeTiles{2, 64, 8, Use::any, 4, 4, false},   DecodeTiles{2, 64, 16, Use::any, 4, 3, false},
    DecodeTiles{2, 128, 8, Use::few, 8, 1, false},  DecodeTiles{2, 128, 8, Use::many, 4, 3, false},
    DecodeTiles{2, 128, 8, Use::any, 4, 2, false},  DecodeTiles{2, 128, 16, Use::few, 8, 1, false},
    DecodeTiles{2, 128, 16, Use::any, 4, 2, false}, DecodeTiles{2, 256, 8, Use::any, 4, 2, true},
    DecodeTiles{2, 576, 8, Use::any, 8, 1, true},   DecodeTiles{2, 576, 8, Use::any, 4, 1, true},
    DecodeTiles{4, 128, 8, Use::any, 4, 2, true},   DecodeTiles{4, 576, 8, Use::any, 4, 1, true},
};

constexpr i64 kMostDecodeWidth = kWidths.back();
constexpr i64 kInvariantTiles = 32;  // of a split

i64 item_of(const DecodeConstants& constants) { return constants.element == Element::fp32 ? 4 : 2; }

/// Rows of the line, in decode_line.h's words; varlen at most.
i64 line_rows(const Problem& problem, i64 packed_rows) {
  const i64 packed = saturating_multiply(problem.query_rows, problem.group());
  const i64 tiles = problem.query_form == QueryForm::varlen
                        ? saturating_add(ceil_div(packed, packed_rows), problem.batch + 1)
                        : saturating_multiply(problem.batch, ceil_div(packed, packed_rows));
  return saturating_multiply(tiles, problem.kv_heads);
}

i64 key_tiles(const Problem& problem, i64 tile) { return std::max<i64>(ceil_div(problem.max_keys, tile), 1); }

std::string decode_refusal(const Problem& problem, const Machine& machine) {
  if (std::string reason = device_refusal(machine); !reason.empty()) return reason;
  return width_refusal(problem, kMostDecodeWidth);
}

bool has_rules(const DecodeConstants& constants) { return constants.natural || constants.mask || constants.dropout; }

DecodeConstants with_tiles(DecodeConstants constants, const DecodeTiles& tiles) {
  constants.query_block = tiles.packed_rows;
  constants.warps = tiles.warps;
  constants.resident_blocks = tiles.resident_blocks;
  constants.wide = tiles.wide;
  return constants;
}

bool is_for(const DecodeTiles& tiles, const Problem& problem, const Machine& machine,
            const DecodeConstants& constants) {
  if (!fits(decode_shared_bytes(with_tiles(constants, tiles)), tiles.resident_blocks, machine.shared_bytes))
    return false;
  const bool by_element = constants.copy_bytes == 0;
  if (tiles.use == Use::any) return true;
  if (by_element || (tiles.use == Use::many && has_rules(constants))) return false;
  if (problem.batch_invariant)
    return tiles.use == Use::many;  // tiles are dealt to warps in turn: eight would show in the bits
  const i64 rows = std::min<i64>(line_rows(problem, tiles.packed_rows), 1 << 20);
  const i32 line = static_cast<i32>(rows), blocks = tiles.resident_blocks * std::max(machine.multiprocessors, 1);
  const i32 splits = most_splits(line, blocks);
  if (tiles.use == Use::many) return nearly_fills(line * splits, blocks);
  return line <= blocks && fills(line * splits, blocks) && key_tiles(problem, kDecodeTile) >= splits * tiles.warps;
}

/// Query rows times heads that share a kv head, of the longest sequence; element by element that is no matter.
i32 packed_rows_of(const Problem& problem, i64 item, i32 width, bool by_element) {
  const bool has_sixteen = std::any_of(kDecodeTiles.begin(), kDecodeTiles.end(), [&](const DecodeTiles& tiles) {
    return tiles.element_bytes == item && tiles.most_width >= width && tiles.packed_rows == 16;
  });
  return has_sixteen && !by_element && rows_of_head(problem) > 8 ? 16 : 8;
}

/// None where no row fits.
std::optional<DecodeConstants> tiled(const Problem& problem, const Machine& machine, int copy_bytes) {
  DecodeConstants constants = rules_of<DecodeConstants>(problem);
  constants.turned = problem.rotary_pairs != 0;
  constants.element = static_cast<Element>(problem.dtype);
  constants.head_width = width_of(problem.head_dim);
  constants.value_width = width_of(problem.value_dim);
  constants.copy_bytes = copy_bytes;
  const i64 item = static_cast<i64>(item_size(problem.dtype));
  const i32 width = std::max(constants.head_width, constants.value_width);
  const i32 packed_rows = packed_rows_of(problem, item, width, copy_bytes == 0);
  const auto tiles = std::find_if(kDecodeTiles.begin(), kDecodeTiles.end(), [&](const DecodeTiles& row) {
    return row.element_bytes == item && row.most_width >= width && row.packed_rows == packed_rows &&
           is_for(row, problem, machine, constants);
  });
  if (tiles == kDecodeTiles.end()) return std::nullopt;
  return with_tiles(constants, *tiles);
}

/// 16 bytes at a time, or element by element.
int decode_copy_bytes(const Problem& problem) {
  CopyBytes copy(problem.dtype);
  copy.narrow(problem.q, problem.head_dim);
  copy.narrow(problem.k, problem.head_dim);
  copy.narrow(problem.v, problem.value_dim);
  return copy.bytes() == 16 ? 16 : 0;
}

/// Query rows times heads that share a kv head, of a sequence in the mean: lengths of packed ones are not known.
i64 mean_rows_of_head(const Problem& problem) {
  if (problem.query_form == QueryForm::dense) return rows_of_head(problem);
  return saturating_multiply(ceil_div(problem.query_rows, std::max<i64>(problem.batch, 1)), problem.group());
}

/// Every tile of packed rows reads K and V for itself. Of wide heads that is at memory's rate, since the table's last rows keep few
/// bytes on their way; others, where there are several tiles, take three quarters of that time (128 columns on an H200, 268 MB: 160 us
/// for four tiles, 233 for five and six, 306 for eight).
i64 bytes_read(const Problem& problem, const Work& work, i64 packed_rows) {
  const bool wide = decodes_wide(problem);
  const i64 rows = wide ? rows_of_head(problem) : mean_rows_of_head(problem);
  const i64 reads = std::max<i64>(ceil_div(rows, packed_rows), 1);
  const i64 bytes = saturating_multiply(work.fused_bytes, reads);
  return wide || reads == 1 ? bytes : bytes / 4 * 3;
}

/// Partial results that may wait to be joined.
i64 partial_slots(const Problem& problem, const Plan& plan) {
  const i64 rows = line_rows(problem, plan.query_block);
  if (plan.split_keys) return saturating_multiply(rows, key_tiles(problem, plan.split_keys));
  if (plan.most_splits) return plan.most_splits == 1 ? 0 : saturating_multiply(rows, plan.most_splits);
  return 2 * plan.blocks;
}

}  // namespace

std::string decode_size_refusal(const Problem& problem, i64 packed_rows, i64 tile) {
  if (std::string reason = rows_refusal(problem); !reason.empty()) return reason;
  if (std::max({problem.capacity, problem.max_keys, problem.key_batches, problem.cache_rows}) > kMostBlocks)
    return text("takes caches of up to ", kMostBlocks, " slots, rows and pages");
  const i64 units = saturating_multiply(line_rows(problem, packed_rows), key_tiles(problem, tile) + kEndingTiles + 1);
  if (units <= kMostBlocks) return "";
  return text("takes up to ", kMostBlocks, " tiles of ", packed_rows, " query rows by ", tile,
              " keys, where the cache is full, not ", units);
}

void share_out(Plan& plan, const Problem& problem, i64 columns, i64 most_parts) {
  if (problem.batch_invariant)
    plan.split_keys = kInvariantTiles * plan.key_block;
  else if (problem.num_splits)
    plan.most_splits =
        static_cast<int>(std::min({i64{problem.num_splits}, key_tiles(problem, plan.key_block), most_parts}));
  const i64 slots = partial_slots(problem, plan), rows = saturating_multiply(slots, plan.query_block);
  const auto bytes = [&](i64 count, i64 size) { return aligned_bytes(saturating_multiply(count, size)); };
  plan.workspace = {
      {"tickets", bytes(slots, 8)},
      {"sums of partial results", bytes(rows, static_cast<i64>(sizeof(RowSum)))},
      {"partial results", bytes(rows, 4 * columns)},
      {"sequences refused", problem.appends && problem.key_form == KeyForm::pages ? bytes(problem.batch, 4) : 0}};
}

i64 decode_columns(const DecodeConstants& constants) {
  const i64 step = 128 / item_of(constants);
  return round_up(constants.value_width, step);
}

i64 decode_shared_bytes(const DecodeConstants& constants) {
  const i64 queries = constants.query_block * (round_up(constants.head_width * item_of(constants), 64) + 16);
  const i64 outputs = 4 * constants.warps * constants.query_block * (decode_columns(constants) + 4);
  return queries + outputs + i64{32} * constants.warps * kLineSequenceBytes;
}

i64 decode_row_tiles(const Problem& problem, i64 packed_rows) {
  return ceil_div(saturating_multiply(problem.query_rows, problem.group()), packed_rows);
}

bool decodes(const Problem& problem) {
  const bool cached = problem.key_form == KeyForm::cache || problem.key_form == KeyForm::pages;
  return problem.operation == Operation::forward && (cached || (problem.num_splits > 1 && !problem.batch_invariant));
}

bool decodes_wide(const Problem& problem) {
  constexpr i64 kNarrowest = 256;
  return decodes(problem) && std::max(problem.head_dim, problem.value_dim) > kNarrowest;
}

DecodeConstants decode_constants(const Problem& problem, const Plan& plan) {
  DecodeConstants constants = rules_of<DecodeConstants>(problem);
  constants.turned = problem.rotary_pairs != 0;
  constants.element = static_cast<Element>(problem.dtype);
  constants.head_width = static_cast<i32>(plan.head_width);
  constants.value_width = static_cast<i32>(plan.value_width);
  constants.query_block = static_cast<i32>(plan.query_block);
  constants.key_block = static_cast<i32>(plan.key_block);
  constants.warps = plan.warps;
  constants.copy_bytes = plan.copy_bytes;
  constants.resident_blocks = plan.resident_blocks;
  constants.wide = plan.rereads_queries;
  return constants;
}

Program decode_program(const DecodeConstants& constants) {
  Config config("shared/decode_args.h");
  config.tiles_and_rules(constants, 32 * constants.warps);
  config.flag("kKeepsQueries", !constants.wide);
  config.flag("kTurnsQueries", constants.turned);
  return {"decode_sm80.cu", "decode_sm80", config.text(), constants.element == Element::fp32, true};
}

Program append_program(Element element) {
  DecodeConstants constants;
  constants.element = element;
  constants.head_width = constants.value_width = kWidths.front();
  constants.warps = kAppendWarps;
  constants.copy_bytes = 16;
  constants.resident_blocks = 1;
  Program program = decode_program(constants);
  program.source = "append_sm80.cu";
  program.function = "append_sm80";
  return program;
}

std::variant<Plan, Refusal> consider_sm80_decode(const Problem& problem, const Work& work, const Machine& machine) {
  if (std::string reason = decode_refusal(problem, machine); !reason.empty()) return reason;
  const std::optional<DecodeConstants> found = tiled(problem, machine, decode_copy_bytes(problem));
  if (!found) return text("no tiles fit ", machine.shared_bytes, " bytes of shared memory");
  const DecodeConstants& constants = *found;
  if (std::string reason = decode_size_refusal(problem, constants.query_block, kDecodeTile); !reason.empty())
    return reason;
  Plan plan;
  plan.family = "sm80";
  plan.decodes = true;
  plan.head_width = constants.head_width;
  plan.value_width = constants.value_width;
  plan.query_block = constants.query_block;
  plan.key_block = kDecodeTile;
  plan.warps = constants.warps;
  plan.resident_blocks = constants.resident_blocks;
  plan.copy_bytes = constants.copy_bytes;
  plan.rereads_queries = constants.wide;
  plan.shared_bytes = decode_shared_bytes(constants);
  plan.blocks = i64{std::max(machine.multiprocessors, 1)} * constants.resident_blocks;
  share_out(plan, problem, decode_columns(constants), kMostBlocks);
  const double rate = machine.flops_per_second * (problem.dtype == DType::fp32 ? kFp32Rate : 1);
  plan.prediction = predict(work.flops, bytes_read(problem, work, plan.query_block), rate, machine.bytes_per_second);
  return plan;
}

std::vector<Program> planned_decode_programs(const Machine&) {
  constexpr std::array kRules{&DecodeConstants::natural, &DecodeConstants::softcap, &DecodeConstants::alibi,
                              &DecodeConstants::bias,    &DecodeConstants::mask,    &DecodeConstants::dropout,
                              &DecodeConstants::turned};
  constexpr i32 kEachWayAt = 128, kMostValueWidth = 512;
  std::vector<Program> programs;
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32}) {
    programs.push_back(append_program(static_cast<Element>(dtype)));
    for (const DecodeTiles& tiles : kDecodeTiles) {
      const bool common = tiles.most_width == kEachWayAt && tiles.use != Use::few;
      if (tiles.element_bytes != static_cast<i64>(item_size(dtype)) || (dtype == DType::fp16 && !common)) continue;
      DecodeConstants plain;
      plain.element = static_cast<Element>(dtype);
      plain.head_width = tiles.most_width;
      plain.value_width = std::min(tiles.most_width, kMostValueWidth);
      plain.copy_bytes = 16;
      plain = with_tiles(plain, tiles);
      programs.push_back(decode_program(plain));
      if (!common || dtype == DType::fp16 || tiles.resident_blocks > 2) continue;
      DecodeConstants other = plain;
      for (bool DecodeConstants::*rule : kRules) other.*rule = true;
      programs.push_back(decode_program(other));
      if (tiles.packed_rows > 8) continue;
      other = plain;
      other.copy_bytes = 0;
      programs.push_back(decode_program(other));
    }
  }
  return programs;
}

}  // namespace narrows
