// A position in a ring of stages. Plain C++, tested on the host.
#pragma once
#include "config.cuh"
#include "shared/params.h"

namespace narrows {

// The phase flips at each wrap. A consumer waits for `full` with phase, a producer for `empty` with phase ^ 1, which
// passes at once in the first round: a barrier counts the phase before its first as completed.
template <int stages> struct RingOf {
  i32 stage = 0;
  u32 phase = 0;

  constexpr void next() {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

using Ring = RingOf<kStages>;

}  // namespace narrows
