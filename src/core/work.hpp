// What a call costs by definition: the IO model of attention, counted exactly.
#pragma once

#include "core/problem.hpp"

namespace narrows {

/// Bytes cross the bridge between device memory and on-chip memory. Standard attention is three kernels, which write and
/// read S and P (backward: P, dP and dS) whole; fused attention moves its inputs and results alone.
struct Work {
  i64 pairs = 0;     // (query, key, head) that lengths, window, causal, chunk, key_begin and key_end leave visible
  double flops = 0;  // forward 2 (d + dv) a pair, backward 2 (3 d + 2 dv)
  i64 fused_bytes = 0;
  double three_kernel_flops = 0;  // of every pair, seen or not; backward 2 (2 d + 2 dv): it stored P
  i64 three_kernel_bytes = 0;
  i64 three_kernel_memory = 0;  // beside inputs and results: S and P (backward: P, dP and dS)
};

/// Reads the length tensors, no element of the others. Counts that 63 bits cannot hold saturate. Lengths on a device are not
/// read: then it is at most this.
Work work(const Call& call);

}  // namespace narrows
