// What the backward kernels are given when they are launched, and where their scratch of a query row or a block lies.
#pragma once
#include "shared/call_args.h"
#include "shared/tile_order.h"

namespace narrows {

// What the backward pass must know of a query row before it can make P and dS. reference: what is subtracted from the exponent,
// LSE log2(e), or the LSE itself where the program's scores are logits (kNatural). +inf: the row weighs no key, or does not
// exist. 0 where the LSE is far out (score.h): it must be read where it is.
struct RowFacts {
  float reference;
  float delta;  // rowsum(dO * O) - dLSE
};

// Where family sm90 keeps a row's reference, and as far behind those of the block its delta: a lane whose scores are of queries
// 2n, 2n + 1, 2n + 8 and 2n + 9 of 16 finds the four together.
constexpr i32 fact_place(i32 row) { return (row & ~15) | (row & 6) << 1 | (row & 8) >> 2 | (row & 1); }

constexpr bool is_far(float lse) { return magnitude(lse) > kFarLse && lse != -kInfinity<float>; }

struct BackwardArgs : CallArgs {
  TensorArg q, k, v, o, dout;
  TensorArg lse, dlse;               // (b, h, s); dlse null: none
  TensorArg dq, dk, dv;              // null: not wanted
  TensorArg dbias;                   // (b, h, sq, sk), stride 0 where it is broadcast; null: not wanted
  TensorArg dslopes;                 // (b, h), stride 0 where one slope is for all sequences; null: not wanted
  bool slopes_of_sequences = false;  // dslopes has one for each sequence
  TensorArg dsinks;                  // strides[0] is the head's; null: not wanted
  i32 bias_sizes[4] = {};            // of dbias, 1 where it is broadcast
  i32 kv_heads = 0;                  // its own number: of no query heads none can be told from the group
  i32 query_blocks = 0;              // of the rows of a head, at most: dense of a sequence, varlen of all
  i32 key_blocks = 0;                // the same of keys
  i32 section = 1;                   // (sequence, kv head) pairs worked on together
  u32* far_rows = nullptr;           // scratch: whether some row's LSE is far out
  RowFacts* rows = nullptr;          // scratch, [pair of queries][query block][row]
  float* query_sums = nullptr;       // dQ / scale, [pair][query block][row, head dim] in the order of accumulators
  float* slope_sums = nullptr;       // [query head][key block of all sequences]
  float* sink_sums = nullptr;        // [query head][query block of all sequences]
  u32* turns = nullptr;  // deterministic: [pair][query block][warp] how many key blocks have added their part
  u32* begun = nullptr;  // the same: number of thread blocks that have begun
};

// A block of a head's rows, of blocks counted over all pairs. Varlen: pairs are heads, and blocks those of all sequences
// (first_block); else pairs are (sequence, head).
struct BlockPlace {
  i64 pair;
  i64 block;
  constexpr i64 number(i32 blocks_of_pair) const { return pair * blocks_of_pair + block; }
};

constexpr BlockPlace block_place(bool varlen, i32 sequence, i32 head, i32 heads, i32 first_row, i32 block,
                                 i32 rows_of_block) {
  if (varlen) return {head, first_block(first_row, sequence, rows_of_block) + block};
  return {i64{sequence} * heads + head, block};
}

}  // namespace narrows
