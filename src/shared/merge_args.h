// What the kernel that joins parts of attention is given when it is launched.
#pragma once
#include "shared/call_args.h"

namespace narrows {

constexpr i32 kMostParts = 32;  // a lane has one
constexpr i32 kMergeWarps = 4;

struct MergePart {
  TensorArg o, lse;  // (b, s, h, dv) and (b, h, s)
};

struct MergeArgs {
  MergePart parts[kMostParts];
  MergePart out;    // lse null: not wanted
  TensorArg sinks;  // strides[0] is the head's; null: none
  i32 count = 0;    // of the parts
  i32 value_dim = 0;
  i64 batch = 0, rows = 0, heads = 0;
};

}  // namespace narrows
