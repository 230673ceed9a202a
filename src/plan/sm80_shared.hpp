// What forward and backward plans of family sm80 share.
#pragma once

#include "core/error.hpp"
#include "plan/plan.hpp"
#include "shared/call_args.h"

#include <algorithm>
#include <array>
#include <limits>

namespace narrows::sm80 {

/// Head dims as they lie on chip.
inline constexpr std::array<i32, 8> kWidths{32, 64, 96, 128, 192, 256, 512, 576};

inline constexpr i32 kWidestValue = 512;

/// head_dim is at most the widest.
constexpr i32 width_of(i64 head_dim) {
  return *std::find_if(kWidths.begin(), kWidths.end(), [&](i32 width) { return width >= head_dim; });
}

/// Of a thread block, beside its tiles: what the system takes, the kernel's own facts, raw rows a unit longer than the tile's.
inline constexpr i64 kSharedBesideTiles = 2048 + 512;
inline constexpr i64 kSystemShared =
    1024;  // of a thread block; a multiprocessor has so much more than one thread block may take

constexpr bool fits(i64 tile_bytes, i32 resident_blocks, i64 shared_bytes) {
  return resident_blocks * (tile_bytes + kSharedBesideTiles) <= shared_bytes + kSystemShared;
}

/// fp32 is three products of tf32, each at half the rate.
inline constexpr double kFp32Rate = 1.0 / 6;

/// What is read again and again of the heads worked on together takes so much of L2.
inline constexpr double kSectionOfL2 = 0.64;

/// Heads, each with so many bytes, that are worked on together.
inline i64 heads_in_l2(const Machine& machine, double bytes) {
  return std::max<i64>(1, static_cast<i64>(kSectionOfL2 * static_cast<double>(machine.l2_bytes) / bytes));
}

/// Of `heads` that are worked on up to `most` at a time: so many that the last section is as full as may be. One of few heads has few
/// tiles, and who takes its longest is the last by far: forward lost up to 11% of a causal call.
inline i64 even_section(i64 heads, i64 most) {
  constexpr i64 kTries = 16;  // a call is planned in microseconds
  if (heads <= most) return std::max<i64>(heads, 1);
  const auto missing = [&](i64 section) { return ceil_div(heads, section) * section - heads; };
  const i64 first = ceil_div(heads, ceil_div(heads, most));
  i64 best = first;
  for (i64 section = first; section > std::max(most / 2, first - kTries) && missing(best) > 0; --section)
    if (missing(section) < missing(best)) best = section;
  return best;
}

inline bool limits_keys(const Rules& rules) {
  const Mask& mask = rules.mask;
  return mask.left < kUnlimited || mask.right < kUnlimited || mask.chunk != 0 || rules.key_begin || rules.key_end;
}

/// Forward: heads whose K and V lie in L2 together. Where every row sees all keys, one at a time shares them best.
inline i64 heads_together(const Problem& problem, const Machine& machine) {
  if (!limits_keys(problem.rules) || problem.max_keys == 0) return 1;
  const i64 item = static_cast<i64>(item_size(problem.dtype));
  const double head = static_cast<double>(problem.max_keys * (problem.head_dim + problem.value_dim) * item);
  const i64 kv_pairs = problem.query_form == QueryForm::varlen ? problem.kv_heads : problem.batch * problem.kv_heads;
  return std::max<i64>(even_section(kv_pairs, heads_in_l2(machine, head)) * problem.group(), 1);
}

/// Numbers of rows, heads and thread blocks are 32-bit there.
inline constexpr i64 kMostBlocks = std::numeric_limits<i32>::max() - 1024;

inline std::string rows_refusal(const Problem& problem) {
  if (std::max(problem.query_rows, problem.key_rows) <= kMostBlocks) return "";
  return text("takes up to ", kMostBlocks, " rows of a tensor");
}

/// rows: "query rows"; blocks of each head's rows.
inline std::string blocks_refusal(std::string_view rows, i64 blocks, i64 heads) {
  if (heads <= kMostBlocks && saturating_multiply(blocks, heads) <= kMostBlocks) return "";
  return text("takes up to ", kMostBlocks, " blocks of ", rows, ", not ", blocks, " of ", heads, " heads");
}

inline std::string device_refusal(const Machine& machine) {
  if (machine.compute_capability < 80)
    return text("needs compute capability 8.0, the device has ", machine.compute_capability / 10, ".",
                machine.compute_capability % 10);
  return "";
}

inline std::string width_refusal(const Problem& problem, i64 widest) {
  if (std::max(problem.head_dim, problem.value_dim) <= widest) return "";
  return text("takes head dims up to ", widest, ", not d=", problem.head_dim, " dv=", problem.value_dim);
}

/// What one copy may take of rows that all are made of such pieces.
class CopyBytes {
 public:
  explicit CopyBytes(DType dtype) : item_(static_cast<i64>(item_size(dtype))) {}

  void narrow(const Layout& layout, i64 columns) {
    if (layout.elements == 0 || bytes_ == 0) return;
    bytes_ = layout.unit_last ? std::min(bytes_, layout.alignment) : 0;
    while (bytes_ && columns * item_ % bytes_ != 0) bytes_ /= 2;
  }
  int bytes() const { return bytes_; }

 private:
  i64 item_;
  int bytes_ = 16;
};

/// fp32's smallest normal number: a scale that is less, times log2(e), is no factor of an exponent there.
inline constexpr double kLeastFusedScale = 1.1754943508222875e-38;

/// What a problem's rules make of a program, forward's or backward's.
template <class Constants> Constants rules_of(const Problem& problem) {
  Constants constants;
  constants.bias = problem.bias.given;
  constants.bias_element = constants.bias ? static_cast<Element>(problem.bias_dtype) : Element::fp32;
  constants.softcap = problem.rules.softcap != 0;
  constants.alibi = problem.alibi_slopes.given;
  constants.natural =
      constants.softcap || constants.alibi || constants.bias || problem.rules.scale * kLog2e < kLeastFusedScale;
  constants.mask = problem.mask.given;
  constants.dropout = problem.rules.dropout > 0;
  return constants;
}

/// The text of config.cuh.
class Config {
 public:
  explicit Config(std::string_view header)
      : text_(narrows::text("#pragma once\n#include \"", header, "\"\nnamespace narrows {\n")) {}

  void element(std::string_view name, Element value) {
    constexpr std::array<std::string_view, 4> kElements{"fp16", "bf16", "fp32", "fp64"};
    text_ +=
        narrows::text("constexpr Element ", name, " = Element::", kElements[static_cast<std::size_t>(value)], ";\n");
  }
  void number(std::string_view name, int value) { text_ += narrows::text("constexpr int ", name, " = ", value, ";\n"); }
  void flag(std::string_view name, bool value) {
    text_ += narrows::text("constexpr bool ", name, " = ", value ? "true" : "false", ";\n");
  }
  /// What every program has.
  template <class Constants> void tiles_and_rules(const Constants& constants, int threads) {
    element("kElement", constants.element);
    element("kBiasElement", constants.bias_element);
    number("kHeadDim", constants.head_width);
    number("kValueDim", constants.value_width);
    number("kBlockQueries", constants.query_block);
    number("kBlockKeys", constants.key_block);
    number("kWarps", constants.warps);
    number("kThreads", threads);
    number("kBlocksOfMultiprocessor", constants.resident_blocks);
    number("kCopyBytes", constants.copy_bytes);
    flag("kNatural", constants.natural);
    flag("kSoftcap", constants.softcap);
    flag("kAlibi", constants.alibi);
    flag("kBias", constants.bias);
    flag("kMask", constants.mask);
    flag("kDropout", constants.dropout);
  }
  void add(std::string_view text) { text_ += text; }
  std::string text() const { return text_ + "}\n"; }

 private:
  std::string text_;
};

}  // namespace narrows::sm80
