// The instruction sets of this CPU, and machines that have one of them.
#pragma once

#include "cpu/tile_kernels.hpp"
#include "plan/machine.hpp"

#include <string>
#include <vector>

namespace narrows::test {

inline std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const auto* kernels : cpu::available_tile_kernels<float>()) names.emplace_back(kernels->name);
  return names;
}

/// All sets, the named one first: a set that does not take a type leaves it to the next. Empty: the best.
class InstructionSets {
 public:
  explicit InstructionSets(const std::string& first) : first_(first) {
    if (!first.empty()) names_.push_back(first_);
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

 private:
  std::string first_;
  std::vector<std::string_view> names_;
};

}  // namespace narrows::test
