// Scratch of the CPU's backward: the plan sizes it and the backend lays it out, both from here.
#pragma once

#include "plan/scratch.hpp"

namespace narrows {

// Upper bounds for the backend's own structs, so that a plan needs none.
inline constexpr i64 kGradientRowBytes = 128, kKeyTileBytes = 64;

/// One query block: bytes from its start to each part.
struct QueryBlockScratch {
  i64 rows = 0;                               // what is known of each
  i64 query_pointers = 0, dout_pointers = 0;  // to rows of Q and dO
  i64 query_panels = 0, dout_panels = 0;      // packed Q and dO, for S and dP
  i64 query_strips = 0, dout_strips = 0;      // and for dK and dV
  i64 bytes = 0;
};
QueryBlockScratch query_block_scratch(const Problem& problem, const Plan& plan);

/// Query blocks of the longest sequence's kv head.
i64 query_blocks_of_head(const Problem& problem, const Plan& plan);

/// Scratch of one thread: bytes from its start to each part. A part that the call does not need has the next one's place.
struct BackwardThreadScratch {
  i64 terms = 0;        // a row of dO and of O
  i64 query_block = 0;  // for dbias
  i64 tiles = 0;        // of the chunk: where each lies
  i64 key_pointers = 0, value_pointers = 0;
  i64 keys = 0;                                                // packed K and V of the chunk
  i64 probabilities = 0, gradients = 0;                        // P and dS of a tile
  i64 transposed_probabilities = 0, transposed_gradients = 0;  // where a product cannot read those
  i64 bias = 0, keep = 0, allowed = 0, derivative = 0;         // of one row and tile
  i64 dk = 0, dv = 0;                                          // sums of the chunk
  i64 dbias = 0;                                               // sums of a part
  i64 bytes = 0;
};
BackwardThreadScratch backward_thread_scratch(const Problem& problem, const Plan& plan);

/// Elements from one row of P and dS to the next.
i64 backward_tile_stride(i64 key_block);

/// Query blocks of dbias that one task sums, so that they share a packed tile of keys.
inline constexpr i64 kBiasBlocks = 4;

/// Regions in the order in which the backend takes them.
enum BackwardRegion : std::size_t { kQueryBlocks, kBackwardProgress, kQuerySums, kSlopeSums, kBackwardThreads };
Regions backward_scratch(const Problem& problem, const Plan& plan);

/// Sets what depends on the problem; tile sizes and threads are set already.
void plan_cpu_backward(const Problem& problem, Plan& plan);

}  // namespace narrows
