// The instruction sets of this CPU, others in plain C++, and machines that have one of them.
#pragma once

#include "cpu/tile_kernels.hpp"
#include "plan/machine.hpp"

#include <algorithm>
#include <array>
#include <string>
#include <vector>

namespace narrows::cpu {
extern const InstructionSet kTileKernelsPairsWide;
extern const InstructionSet kTileKernelsRegistersWide;
}  // namespace narrows::cpu

namespace narrows::test {

/// The text of a set of the library over plain C++, which every machine can execute.
struct EmulatedSet {
  const cpu::InstructionSet& set;
  std::string_view original;  // whose plan it runs
  std::string_view name() const { return set.single.name; }
};
inline const std::array<EmulatedSet, 2>& emulated_sets() {
  static const std::array<EmulatedSet, 2> sets = [] {
    cpu::add_tile_kernels(cpu::kTileKernelsPairsWide);
    cpu::add_tile_kernels(cpu::kTileKernelsRegistersWide);
    return std::array{EmulatedSet{cpu::kTileKernelsPairsWide, "avx512bf16"},
                      EmulatedSet{cpu::kTileKernelsRegistersWide, "amx"}};
  }();
  return sets;
}

inline std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const auto* kernels : cpu::available_tile_kernels<float>()) names.emplace_back(kernels->name);
  for (const EmulatedSet& emulated : emulated_sets()) names.emplace_back(emulated.name());
  return names;
}

/// Those that multiply bf16, and so take tensors of no other type.
inline std::vector<std::string> bf16_sets() {
  std::vector<std::string> names;
  for (const auto* kernels : cpu::available_tile_kernels<float>())
    if (kernels->operand == DType::bf16) names.emplace_back(kernels->name);
  for (const EmulatedSet& emulated : emulated_sets()) names.emplace_back(emulated.name());
  return names;
}

/// `wanted`, or what the set takes.
inline DType type_for(const std::string& set, DType wanted) {
  const std::vector<std::string> narrow = bf16_sets();
  return std::find(narrow.begin(), narrow.end(), set) != narrow.end() ? DType::bf16 : wanted;
}

/// All sets of this CPU after the named one: a set that does not take a type leaves it to the next. Empty: the best.
class InstructionSets {
 public:
  explicit InstructionSets(const std::string& first) : first_(first) {
    for (const EmulatedSet& set : emulated_sets())
      if (set.name() == first) emulated_ = &set;
    if (!first.empty()) names_.push_back(emulated_ ? emulated_->original : first_);
    for (const auto* kernels : cpu::available_tile_kernels<float>()) names_.emplace_back(kernels->name);
  }
  InstructionSets(const InstructionSets&) = delete;
  InstructionSets& operator=(const InstructionSets&) = delete;

  Machine machine() const {
    Machine machine;
    machine.name = "test";
    machine.instruction_sets = names_;
    return machine;
  }
  /// What executes a plan that was made for the machine.
  std::string_view executing(std::string_view planned) const {
    return emulated_ && planned == emulated_->original ? emulated_->name() : planned;
  }

 private:
  std::string first_;
  const EmulatedSet* emulated_ = nullptr;
  std::vector<std::string_view> names_;
};

}  // namespace narrows::test
