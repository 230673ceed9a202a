// Which part of a call a thread block computes: some query rows of one head of one sequence. Plain C++, tested on the host.
#pragma once
#include "shared/params.h"

namespace narrows {

// A block of query rows, counted over the rows of all sequences, and a head: varlen calls; dense ones count (batch, head) pairs.
struct TileNumber {
  i32 block, pair;
};

// `section` pairs are worked on together, their last query blocks first: with a causal mask these are the longest, and the
// K and V of a section are in L2 at once. One pair at a time shares K and V best.
// blocks * pairs, which is the grid, is below 2^31.
constexpr TileNumber tile_number(u32 index, u32 blocks, u32 pairs, u32 section) {
  const u32 per_section = section * blocks, number = index / per_section, rest = index % per_section;
  const u32 width = min_of(section, pairs - number * section);
  return {static_cast<i32>(blocks - 1 - rest / width), static_cast<i32>(number * section + rest % width)};
}

// Varlen: the number of a sequence's first block. With a row to spare for each sequence before it the next one begins after its
// last block, whatever the lengths are, and no sum over them is needed.
constexpr i64 first_block(i64 first_row, i32 sequence, i32 rows_of_block) {
  return first_row / rows_of_block + sequence;
}

// Enough for `rows` rows of `sequences` sequences.
constexpr i64 block_count(i64 rows, i32 sequences, i32 rows_of_block) {
  return first_block(rows, sequences, rows_of_block) + 1;
}

}  // namespace narrows
