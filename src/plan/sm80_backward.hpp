// Family sm80, backward: the constants of its programs, and the programs that CI compiles.
#pragma once

#include "plan/plan.hpp"
#include "plan/program.hpp"
#include "shared/backward_args.h"

#include <vector>

namespace narrows {

/// What makes kernels/backward_*.cu programs. Lengths, strides, masks and every number of a rule are arguments instead.
struct BackwardConstants {
  Element element = Element::bf16;
  Element bias_element = Element::fp32;
  i32 head_width = 0, value_width = 0;
  i32 query_block = 0;  // rows of Q of a step
  i32 key_block = 0;    // keys of a thread block
  i32 warps = 0;
  i32 column_warps = 1;  // that share the same keys: each has a part of the columns of dK and dV
  i32 stages = 2;        // of Q and dO
  i32 copy_bytes = 0, resident_blocks = 0;
  bool vector_sums = false;    // four sums at once, from compute capability 9.0 on
  bool deterministic = false;  // thread blocks add to dQ in turn
  bool natural = false;        // scores are logits already when they are exponentiated
  bool softcap = false, alibi = false, bias = false, mask = false, dropout = false;

  bool operator==(const BackwardConstants&) const = default;
};

/// The kernels of a backward call, in the order in which they run.
enum class BackwardKernel { rows, keys, queries, sums, bias };

}  // namespace narrows
