// narrows info: this machine, this build.
#include <array>
#include <cstdio>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/environment.hpp"
#include "cpu/tile_kernels.hpp"
#include "tools/commands.hpp"
#include "tools/files/failure.hpp"
#include "tools/info_cuda.hpp"

namespace narrows::cli {
namespace {

using Json = nlohmann::ordered_json;

struct InstructionSetInfo {
  std::string_view name;
  std::string_view needs;
  bool usable;
};

std::vector<InstructionSetInfo> instruction_sets() {
  constexpr std::array kKnown{InstructionSetInfo{"amx", "AMX-TILE, AMX-BF16 and what avx512bf16 needs", false},
                              InstructionSetInfo{"avx512bf16", "AVX512-BF16 and what avx512 needs", false},
                              InstructionSetInfo{"avx512", "AVX-512 F, DQ, BW and VL", false},
                              InstructionSetInfo{"avx2", "AVX2, FMA and F16C", false},
                              InstructionSetInfo{"neon", "Advanced SIMD of AArch64", false},
                              InstructionSetInfo{"portable", "nothing beyond the architecture's baseline", false}};
  std::vector<InstructionSetInfo> sets(kKnown.begin(), kKnown.end());
  for (InstructionSetInfo& set : sets)
    for (const cpu::TileKernels<float>* kernels : cpu::available_tile_kernels<float>())
      if (set.name == kernels->name) set.usable = true;
  return sets;
}

std::string state_of(const InstructionSetInfo& set, const Info& info) {
  if (set.name == info.instruction_set) return "chosen";
  return set.usable ? "available" : fmt::format("not on this CPU: needs {}", set.needs);
}

std::string as_json(const Info& info) {
  Json object{{"version", info.version},
              {"cpu", info.cpu},
              {"instruction_set", info.instruction_set},
              {"instruction_sets", Json::array()},
              {"threads", info.threads},
              {"families", Json::array()},
              {"cuda", cuda_json()},
              {"environment", Json::array()}};
  for (const InstructionSetInfo& set : instruction_sets())
    object["instruction_sets"].push_back(
        {{"name", set.name}, {"available", set.usable}, {"detail", state_of(set, info)}});
  for (const FamilyInfo& family : info.families)
    object["families"].push_back({{"name", family.name}, {"available", family.available}, {"detail", family.detail}});
  for (const environment::Variable& variable : environment::variables())
    object["environment"].push_back(
        {{"name", variable.name}, {"value", variable.value}, {"meaning", variable.meaning}});
  return object.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string as_text(const Info& info) {
  std::string lines = fmt::format("narrows {}\n", info.version);
  lines += fmt::format("{:<18}{}\n{:<18}{}\n", "cpu", info.cpu, "threads", info.threads);
  std::string_view label = "instruction sets";
  for (const InstructionSetInfo& set : instruction_sets()) {
    lines += fmt::format("{:<18}{:<12}{}\n", label, set.name, state_of(set, info));
    label = "";
  }
  label = "families";
  for (const FamilyInfo& family : info.families) {
    lines +=
        fmt::format("{:<18}{:<10}{}{}\n", label, family.name, family.available ? "" : "not available: ", family.detail);
    label = "";
  }
  lines += cuda_text();
  label = "environment";
  for (const environment::Variable& variable : environment::variables()) {
    lines += fmt::format("{:<18}{:<17}{:<12}{}\n", label, variable.name,
                         variable.value.empty() ? "(not set)" : files::printable(variable.value), variable.meaning);
    label = "";
  }
  return lines;
}

}  // namespace

Command add_info(CLI::App& app) {
  CLI::App& command = add_command(app, "info", "Say what this build and this machine can do",
                                  "  narrows info\n  NARROWS_THREADS=4 narrows info --json");
  const auto json = std::make_shared<bool>(false);
  add_flag(command, "--json", *json, {"", "One object on stdout"});
  return [json] {
    const Info info = narrows::info();
    fmt::print("{}", *json ? as_json(info) + "\n" : as_text(info));
    return kOk;
  };
}

}  // namespace narrows::cli
