// The planned set: the programs that are compiled ahead, where no such GPU need be.
#pragma once

#include "plan/machine.hpp"
#include "plan/program.hpp"

#include <string_view>
#include <vector>

namespace narrows::cuda {

/// What plans need to know of an architecture ("sm_80", "sm_90a"). Throws Error where it is not one that Narrows plans for.
Machine machine_of(std::string_view architecture);
/// Of every family and operation.
std::vector<Program> planned_programs(std::string_view architecture);

}  // namespace narrows::cuda
