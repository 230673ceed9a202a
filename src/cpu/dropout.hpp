// A call's dropout, in forward and backward, by the rule of shared/philox.h.
#pragma once

#include "core/problem.hpp"
#include "shared/philox.h"

namespace narrows::cpu {

/// The call's rule; seed and offset are read here, when the call runs. Threshold 65536 without dropout.
inline DropoutRule dropout_rule(const Problem& problem, const Buffers& buffers) {
  const Origin& origin = problem.rules.origin;
  return {buffers.seed.read(),
          static_cast<u32>(buffers.offset.read()),
          keep_threshold(problem.rules.dropout),
          origin.b,
          origin.h,
          origin.i,
          origin.j,
          origin.H ? origin.H : problem.heads};
}

}  // namespace narrows::cpu
