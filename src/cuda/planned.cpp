#include "cuda/planned.hpp"

#include "core/error.hpp"
#include "plan/sm80.hpp"
#include "plan/sm80_backward.hpp"
#include "plan/sm80_decode.hpp"
#include "plan/sm80_merge.hpp"
#include "plan/sm90.hpp"
#include "plan/sm90_backward.hpp"
#include "plan/sm90_decode.hpp"

#include <algorithm>
#include <array>
#include <utility>

namespace narrows::cuda {
namespace {

struct Architecture {
  std::string_view name;
  int compute_capability;
  i64 shared_kib;  // of a thread block at most (CUDA C++ Programming Guide, technical specifications by compute capability)
};

constexpr std::array kArchitectures{
    Architecture{"sm_80", 80, 163},   Architecture{"sm_86", 86, 99},   Architecture{"sm_87", 87, 163},
    Architecture{"sm_89", 89, 99},    Architecture{"sm_90a", 90, 227}, Architecture{"sm_100", 100, 227},
    Architecture{"sm_103", 103, 227}, Architecture{"sm_120", 120, 99}, Architecture{"sm_121", 121, 99}};

std::string all_names() {
  std::string names;
  for (const Architecture& architecture : kArchitectures) {
    if (!names.empty()) names += ", ";
    names += architecture.name;
  }
  return names;
}

}  // namespace

Machine machine_of(std::string_view architecture) {
  const auto known = std::find_if(kArchitectures.begin(), kArchitectures.end(),
                                  [&](const Architecture& entry) { return entry.name == architecture; });
  if (known == kArchitectures.end()) refuse_value("architecture", architecture, text("must be one of ", all_names()));
  Machine machine;
  machine.device = {DeviceKind::cuda, 0};
  machine.name = known->name;
  machine.compute_capability = known->compute_capability;
  machine.shared_bytes = known->shared_kib * 1024;
  return machine;
}

std::vector<Program> planned_programs(std::string_view architecture) {
  const Machine machine = machine_of(architecture);
  std::vector<Program> programs = planned_forward_programs(machine);
  for (Program& program : planned_backward_programs(machine)) programs.push_back(std::move(program));
  for (Program& program : planned_forward_sm90_programs(machine)) programs.push_back(std::move(program));
  for (Program& program : planned_backward_sm90_programs(machine)) programs.push_back(std::move(program));
  for (Program& program : planned_decode_programs(machine)) programs.push_back(std::move(program));
  for (Program& program : planned_decode_sm90_programs(machine)) programs.push_back(std::move(program));
  for (Program& program : planned_merge_programs()) programs.push_back(std::move(program));
  return programs;
}

}  // namespace narrows::cuda
