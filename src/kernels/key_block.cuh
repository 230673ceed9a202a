// Facts of the keys whose dK and dV a thread block computes, and of the blocks of query rows that see them.
#pragma once
#include "kernels/backward_tiles.cuh"

namespace narrows {

// Query rows as 32-bit numbers.
struct Rows {
  i32 begin, end;
};

inline Rows query_rows(const Range& range) { return {static_cast<i32>(range.begin), static_cast<i32>(range.end)}; }

struct KeyBlock : SequenceFacts {
  i32 kv_head;
  i32 first;                 // key, within the sequence
  i32 rows;                  // of them, that the tensors have; results are written for these
  Rows seeing;               // query rows that may see them
  i32 begin_tile, end_tile;  // their blocks
  i32 number;                // of the block, of all sequences
};

inline i32 query_tiles(const SequenceFacts& facts) { return ceil_div(facts.queries, kBlockQueries); }

// Keys [first, first + kBlockKeys) that exist.
inline Range keys_of(const KeyBlock& block) { return {block.first, min_of(block.first + kBlockKeys, block.keys)}; }

// The first block of keys that `tiles` blocks of query rows see, from block `tile` on.
inline i32 first_key_block(const CallArgs& args, const SequenceFacts& facts, i32 tile, i32 tiles) {
  const i32 row = tile * kBlockQueries;
  const Range rows{row, min_of(row + tiles * kBlockQueries, facts.queries)};
  return static_cast<i32>(key_range(args.visibility, rows, facts.shift, facts.keys).begin) / kBlockKeys;
}

// And the last.
inline i32 last_key_block(const CallArgs& args, const SequenceFacts& facts, i32 tile, i32 tiles) {
  const i32 row = tile * kBlockQueries;
  const Range rows{row, min_of(row + tiles * kBlockQueries, facts.queries)};
  return (static_cast<i32>(key_range(args.visibility, rows, facts.shift, facts.keys).end) - 1) / kBlockKeys;
}

// The keys' own sequence. With broken bounds no row can be told whose it is: all results are NaN.
inline Part find_keys(const BackwardArgs& args, i32 block, i32 dense_sequence, bool reports) {
  if (!is_varlen(args.cu_seqlens_k)) return {dense_sequence, 0, args.key_rows, false};
  return find_sequence(args, key_bounds(args), block, kBlockKeys, reports);
}

// last_first: a pair's last block of keys begins first.
inline KeyBlock find_key_block(const BackwardArgs& args, u32 index, bool last_first = false) {
  const bool varlen = is_varlen(args.cu_seqlens_k);
  const i32 kv_heads = args.kv_heads;
  const u32 pairs = static_cast<u32>(varlen ? kv_heads : args.batch * kv_heads);
  const TileNumber tile = tile_number(index, static_cast<u32>(args.key_blocks), pairs, static_cast<u32>(args.section));
  // With a causal mask the first keys are seen most.
  const i32 number = last_first ? tile.block : args.key_blocks - 1 - tile.block;
  const bool alone = args.query_rows == 0;  // then no block of query rows reports what is broken
  Part keys = find_keys(args, number, tile.pair / kv_heads, alone && index == 0);
  keys.broken |= bounds_break(args, query_bounds(args));
  KeyBlock block{};
  block.sequence = keys.sequence;
  block.first_key = keys.begin;
  block.broken = keys.broken;
  i32 first = number * kBlockKeys;
  if (varlen) first -= static_cast<i32>(first_block(keys.begin, keys.sequence, kBlockKeys)) * kBlockKeys;
  if (keys.sequence < args.batch && !keys.broken) {
    const bool reports = alone && first == 0 && threadIdx.x == 0;
    static_cast<SequenceFacts&>(block) =
        facts_of(args, part_of(args, query_bounds(args), keys.sequence, false), keys, reports);
  }
  block.kv_head = varlen ? tile.pair : tile.pair % kv_heads;
  block.first = first;
  block.number = varlen ? number : keys.sequence * args.key_blocks + number;
  block.rows = clamp_to(keys.count - block.first, 0, kBlockKeys);
  if (!block.broken && block.first < block.keys) {
    block.seeing = query_rows(query_range(args.visibility, keys_of(block), block.queries, block.shift));
    // Keys that no row sees have no turn: those of an empty range may lie within a block of rows.
    if (block.seeing.begin < block.seeing.end) {
      block.begin_tile = block.seeing.begin / kBlockQueries;
      block.end_tile = ceil_div(block.seeing.end, kBlockQueries);
    }
  }
  return block;
}

// Where block `tile` of the sequence's query rows lies among those of all, for head `head`.
inline i64 query_block_number(const BackwardArgs& args, const SequenceFacts& facts, i32 head, i32 tile) {
  return block_place(is_varlen(args.cu_seqlens_q), facts.sequence, head, args.heads, facts.first_query, tile,
                     kBlockQueries)
      .number(args.query_blocks);
}

}  // namespace narrows
