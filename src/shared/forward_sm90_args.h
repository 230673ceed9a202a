// What the forward kernel of family sm90 is given when it is launched.
#pragma once
#include "shared/forward_args.h"

namespace narrows {

// What the copy engine knows of a tensor: as large and aligned as the driver's own type for it.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

struct ForwardSm90Args : ForwardArgs {
  TensorMap q_map, k_map, v_map, o_map;  // of columns, rows, heads, sequences
  u32 tiles = 0;                         // of query rows and heads, some of them without rows
  u32* tiles_taken = nullptr;            // 0 when the kernel begins; null: thread blocks take every gridDim.x-th tile
};

}  // namespace narrows
