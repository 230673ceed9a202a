// GPUs that are not here, as plans see them.
#pragma once

#include "plan/machine.hpp"

#include <array>

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

}  // namespace narrows::test
