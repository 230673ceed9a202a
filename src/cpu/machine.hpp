// This CPU as numbers for the planner.
#pragma once

#include "plan/machine.hpp"

#include <cstdint>

namespace narrows::cpu {

/// Name, instruction set and cores of this process. Rates stay 0: measuring takes time (peak.hpp).
Machine machine();

/// Of core 0's data cache of a level, 1 to 3, as the system gives it; 0 where it says nothing.
std::int64_t cache_bytes(int level);

}  // namespace narrows::cpu
