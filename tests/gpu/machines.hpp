// GPUs that are not here, as plans see them.
#pragma once

#include "core/error.hpp"
#include "plan/plan.hpp"

#include <array>
#include <optional>
#include <variant>

#include <gtest/gtest.h>

namespace narrows::test {

struct Numbers {
  int compute_capability = 0, multiprocessors = 0;
  std::int64_t shared_bytes = 0, l2_bytes = 0;
};
// CUDA's programming guide: shared memory that a block may ask for.
inline constexpr std::array kMachines{Numbers{80, 108, 166912, 40 << 20},   Numbers{86, 84, 101376, 6 << 20},
                                      Numbers{89, 128, 101376, 72 << 20},   Numbers{90, 132, 232448, 50 << 20},
                                      Numbers{100, 148, 232448, 126 << 20}, Numbers{120, 170, 101376, 96 << 20}};

inline Machine machine_of(const Numbers& numbers) {
  Machine machine{.device = {DeviceKind::cuda, 0}, .name = "another", .instruction_sets = {}};
  machine.compute_capability = numbers.compute_capability;
  machine.multiprocessors = numbers.multiprocessors;
  machine.shared_bytes = numbers.shared_bytes;
  machine.l2_bytes = numbers.l2_bytes;
  return machine;
}

/// Of family sm80. Some GPUs have too little shared memory for the widest rows of fp32.
inline std::optional<Plan> plan_for(const Call& call, const Numbers& numbers) {
  const std::variant<Plan, Refusal> answer = consider_sm80(call.problem, work(call), machine_of(numbers));
  if (const Plan* plan = std::get_if<Plan>(&answer)) return *plan;
  EXPECT_EQ(std::get<Refusal>(answer), text("no tiles fit ", numbers.shared_bytes, " bytes of shared memory"));
  return std::nullopt;
}

}  // namespace narrows::test
