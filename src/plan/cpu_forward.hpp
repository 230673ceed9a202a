// Scratch of the CPU's forward: the plan sizes it and the backend lays it out, both from here.
#pragma once

#include "plan/scratch.hpp"

namespace narrows {

// Upper bounds for the backend's own structs, so that a plan needs none.
inline constexpr i64 kQueryRowBytes = 128, kKvHeadBytes = 192, kRunningSumBytes = 32;

/// Scratch of one thread: bytes from its start to each part. A part that the call does not need has the next one's place.
struct ForwardThreadScratch {
  // Of the first head; each that is attended to together with it has the same, slot_bytes further.
  i64 rows = 0;     // of a query block: what is known of each
  i64 queries = 0;  // Q, packed or as rows of whole vectors
  i64 scores = 0;   // a panel of S
  i64 outputs = 0;  // O before it is normalised
  i64 slot_bytes = 0;
  // Of all of them:
  i64 bias = 0;      // of one row and tile
  i64 keep = 0;      // of dropout, of one row and tile
  i64 allowed = 0;   // of the mask, of one row and tile
  i64 pointers = 0;  // to rows of Q, K or V
  i64 rotated = 0;   // a panel of Q
  i64 tile = 0;      // packed K and V, where heads are not packed ahead; or some rows, converted
  i64 bytes = 0;
};
ForwardThreadScratch forward_thread_scratch(const Problem& problem, const Plan& plan);

/// Elements from one row of a panel of S to the next.
i64 forward_score_stride(i64 key_block);

// Reading in place: kv heads together at most; keys that one of them attends to before the next does, and that are converted
// at once where a kernel cannot read them; rows known beyond a block, to be fetched ahead.
inline constexpr i64 kMostHeadsTogether = 8, kKeysTogether = 16, kRowsBeyond = 32;

/// Parts that the plan's keys are split into; 1 = not split.
i64 forward_splits(const Problem& problem, const Plan& plan);

/// Regions in the order in which the backend takes them.
enum ForwardRegion : std::size_t { kPacked, kHeads, kHeadProgress, kThreads, kPartialOutputs, kPartialSums };
Regions forward_scratch(const Problem& problem, const Plan& plan);

/// Sets what depends on the problem; tile sizes and threads are set already.
void plan_cpu_forward(const Problem& problem, Plan& plan);

}  // namespace narrows
