// What the sm90 backward kernels do with tiles in shared memory: fill them, clear rows of them, multiply them.
#pragma once
#include "kernels/backward_steps_sm90.cuh"

namespace narrows {

// A tile, in boxes of 64 columns.
template <SmemTile tile> inline void load_tile(u32 to, const TensorMap& map, u32 barrier, BoxPlace from, u64 hint) {
  for (int chunk = 0; chunk < tile.row_bytes / kChunkBytes; ++chunk, from.column += kChunkColumns)
    load_box(to + static_cast<u32>(chunk * tile.rows * kChunkBytes), map, barrier, from, hint);
}

// Zeros in rows [begin, end) of a tile, by the threads of a warpgroup.
template <SmemTile tile> inline void clear_rows(u32 to, i32 begin, i32 end) {
  constexpr int units = tile.row_bytes / kUnitBytes;
  for (i32 index = begin * units + static_cast<i32>(thread_index()) % kWarpgroup; index < end * units;
       index += kWarpgroup)
    store_shared128(to + tile.offset(index / units, index % units), {0, 0, 0, 0});
}

// Facts of rows that weigh nothing, the same way.
inline void clear_facts(u32 facts, i32 begin, i32 end) {
  const i32 row = begin + static_cast<i32>(thread_index()) % kWarpgroup;
  if (row >= end) return;
  const u32 at = facts + static_cast<u32>(4 * fact_place(row));
  store_shared(at, as_bits(kInfinity<float>));
  store_shared(at + kFactBytes / 2, 0);
}

// What shows the engine and the tensor cores, to all of a warpgroup, what its threads wrote.
inline void publish(int warpgroup) {
  fence_async_shared();
  meet(1 + warpgroup, kWarpgroup);
}

// 64 keys by all queries of the step, over the columns. keys: the first of the 64 rows.
template <SmemTile own, SmemTile step> inline void begin_scores(Scores& s, u32 keys, u32 queries) {
  const u64 a = descriptor_along_rows(keys), b = descriptor_along_rows(queries);
  fence_products();
#pragma unroll
  for (int i = 0; i < own.row_bytes / (16 * kElementBytes); ++i)
    multiply_scores(s, a + step_along_rows(own, i), b + step_along_rows(step, i), i > 0);
  commit_products();
}

}  // namespace narrows
