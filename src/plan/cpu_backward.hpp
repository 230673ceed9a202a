// The backward half of family cpu's plan.
#pragma once

#include "plan/plan.hpp"

namespace narrows {

/// For a problem that the family takes.
std::variant<Plan, Refusal> plan_cpu_backward(const Problem& problem, const Work& work, const Machine& machine);

}  // namespace narrows
