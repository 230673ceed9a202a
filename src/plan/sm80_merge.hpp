// Family sm80's program that joins parts of attention.
#pragma once

#include "plan/program.hpp"
#include "shared/call_args.h"

#include <vector>

namespace narrows {

/// Of kernels/merge_sm80.cu; element: O's.
Program merge_program(Element element);

std::vector<Program> planned_merge_programs();

}  // namespace narrows
