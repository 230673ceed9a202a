// Family sm80: the constants of its programs, and the programs that CI compiles.
#pragma once

#include "plan/plan.hpp"
#include "plan/program.hpp"
#include "shared/forward_args.h"

#include <vector>

namespace narrows {

/// What makes kernels/forward_sm80.cu one program. Lengths, strides, masks and every number of a rule are arguments instead.
struct ForwardConstants {
  Element element = Element::bf16;
  Element bias_element = Element::fp32;
  i32 head_width = 0, value_width = 0, query_block = 0, key_block = 0;
  i32 value_slices = 1;  // thread blocks that share the columns of V
  i32 warps = 0, copy_bytes = 0, resident_blocks = 0;
  bool skips_rescale = false;  // looks whether O must be rescaled
  bool natural = false;        // scores are logits already when they are exponentiated
  bool softcap = false, alibi = false, bias = false, mask = false, dropout = false;

  bool operator==(const ForwardConstants&) const = default;
};

ForwardConstants forward_constants(const Problem& problem, const Plan& plan);
Program forward_program(const ForwardConstants& constants);

/// Dynamic shared memory of a thread block.
i64 forward_shared_bytes(const ForwardConstants& constants);

/// For every row of the table the plain program and the one with every rule on; for one row of each element each rule alone.
/// shared_bytes, of a thread block at most, and compute_capability are the device's.
std::vector<Program> planned_forward_programs(const Machine& machine);

}  // namespace narrows
