// What the kernel that joins parts of attention is given when it is launched.
#pragma once
#include "shared/call_args.h"

namespace narrows {

constexpr i32 kMostMerged = 32;  // a lane has one
constexpr i32 kMergeWarps = 4;

struct MergePart {
  TensorArg o, lse;  // (b, s, h, dv) and (b, h, s)
};

// What the gradients of a row's parts share.
struct MergedRow {
  float largest, sum;  // Merge, of its LSEs
  float gradient;      // dLSE - dO . O
};

// The gradient is made in three steps, each a program: what each row's gradients share, then those of some parts at a time, then
// the sinks'.
enum class MergeStep { rows, parts, sinks };

struct MergeBackwardArgs {
  // Of the step `rows` all parts; of `parts` some, and from kGradientsAt on their gradients, null where not wanted.
  MergePart parts[kMostMerged];
  TensorArg dout, dlse;         // dlse null: zeros
  TensorArg sinks, dsinks;      // strides[0] is the head's; null: none
  MergedRow* merged = nullptr;  // scratch: of each row
  i32 count = 0;                // of the parts
  i32 value_dim = 0;
  i64 batch = 0, rows = 0, heads = 0;
};
constexpr i32 kGradientsAt = kMostMerged / 2;
static_assert(sizeof(MergeBackwardArgs) <= 4096, "a kernel's argument has a limit");

struct MergeArgs {
  MergePart parts[kMostMerged];
  MergePart out;    // lse null: not wanted
  TensorArg sinks;  // strides[0] is the head's; null: none
  i32 count = 0;    // of the parts
  i32 value_dim = 0;
  i64 batch = 0, rows = 0, heads = 0;
};

}  // namespace narrows
