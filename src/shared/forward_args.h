// What the forward kernel is given when it is launched.
#pragma once
#include "shared/call_args.h"

namespace narrows {

struct ForwardArgs : CallArgs {
  TensorArg q, k, v, o;
  TensorArg lse;    // (b, h, s); null: not wanted
  i32 section = 1;  // heads worked on together
  i32 blocks = 0;   // of query rows, at most, of all sequences
};

}  // namespace narrows
