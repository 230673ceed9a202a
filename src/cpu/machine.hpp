// This CPU as numbers for the planner.
#pragma once

#include "plan/machine.hpp"

namespace narrows::cpu {

/// Name, instruction set and cores of this process. Rates stay 0: measuring takes time (peak.hpp).
Machine machine();

}  // namespace narrows::cpu
