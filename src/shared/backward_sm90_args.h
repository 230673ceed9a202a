// What the kernel of dK, dV and the parts of dQ of family sm90 is given when it is launched.
#pragma once
#include "shared/backward_args.h"
#include "shared/forward_sm90_args.h"

namespace narrows {

struct BackwardSm90Args : BackwardArgs {
  TensorMap q_map, dout_map, k_map, v_map;  // of columns, rows, heads, sequences
};

}  // namespace narrows
