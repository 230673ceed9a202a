// A GPU as numbers for the planner.
#pragma once

#include "plan/machine.hpp"

#include <string>

namespace narrows::cuda {

/// Throws Error where there is no CUDA or no such device.
Machine machine(const Device& device);

/// What CUDA calls would run on, or why there are none.
struct Presence {
  int devices = 0;
  std::string detail;
};
Presence presence();

}  // namespace narrows::cuda
