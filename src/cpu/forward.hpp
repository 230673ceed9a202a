// Exact attention on the CPU: blocked online softmax, memory linear in the sequence.
#pragma once

#include "core/problem.hpp"
#include "plan/plan.hpp"

namespace narrows::cpu {

/// Computes what a plan of family cpu accepted. Writes every element of o and lse, also of rows in no sequence. A row's bits
/// depend on its query, the keys and values that it sees, the options and the plan's instruction set and key block alone.
void run_forward(const Problem& problem, const Plan& plan, const Buffers& buffers);

}  // namespace narrows::cpu
