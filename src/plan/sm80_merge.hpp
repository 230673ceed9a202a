// Family sm80's programs that join parts of attention, and that make the gradient of that.
#pragma once

#include "plan/program.hpp"
#include "shared/merge_args.h"

#include <vector>

namespace narrows {

/// Of kernels/merge_sm80.cu; element: O's.
Program merge_program(Element element);
/// Of kernels/merge_backward_sm80.cu.
Program merge_backward_program(Element element, MergeStep step);

std::vector<Program> planned_merge_programs();

}  // namespace narrows
