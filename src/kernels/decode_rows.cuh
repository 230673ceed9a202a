// The line of work of a call (decode_line.h), made from lengths that only the device knows, by each warp for itself.
#pragma once
#include "kernels/cache_sequences.cuh"
#include "kernels/decode_tiles.cuh"
#include "shared/decode_line.h"

namespace narrows {

// Of a sequence: rows of the line for each kv head, which are tiles of packed rows, and tiles of keys of each row, at most.
struct SequenceLine {
  i32 row_tiles, tiles;
};

inline bool has_varlen_queries(const DecodeArgs& args) { return args.cu_seqlens_q.data != nullptr; }

inline i32 sequences_of(const DecodeArgs& args) { return args.batch + (has_varlen_queries(args) ? 1 : 0); }

inline i32 packed_tiles(const DecodeArgs& args, i32 queries) {
  return static_cast<i32>(ceil_div(i64{queries} * args.group, i64{kBlockQueries}));
}

// Varlen: whether sequence s, or the rows behind the last one, begins and ends where it may.
inline bool breaks_bounds(const DecodeArgs& args, i32 s, bool reports) {
  const Bounds bounds = query_bounds(args);
  const bool last = s == args.batch;
  const i32 begin = at(bounds.starts, s), end = last ? bounds.rows : at(bounds.starts, s + 1);
  return breaks(args, reports, min_of(s, args.batch - 1),
                last ? bounds_breach(bounds.code, 0, begin, end, true)
                     : bounds_breach(bounds.code, begin, end, bounds.rows, s == 0));
}

// Query rows of sequence s; of number `batch`, the rows behind the last one. With broken bounds all rows are sequence 0's.
inline Part query_part(const DecodeArgs& args, i32 s, bool broken) {
  if (broken) return {0, 0, args.query_rows, true};
  if (!has_varlen_queries(args)) return {s, 0, args.query_rows, false};
  const i32 begin = at(args.cu_seqlens_q, s), end = s == args.batch ? args.query_rows : at(args.cu_seqlens_q, s + 1);
  return {s, begin, end - begin, false};
}

// The first tile that rows with these keys may read. With a fixed split the tiles begin where the first key's split does.
inline i32 first_tile(const DecodeArgs& args, i32 first_key) {
  const i32 unit = max_of(args.fixed_split, 1);
  return first_key / kTileKeys / unit * unit;
}

inline SequenceLine sequence_line(const DecodeArgs& args, i32 s, bool broken, bool reports) {
  const Part queries = query_part(args, s, broken);
  SequenceLine line{packed_tiles(args, queries.count), 0};
  if (broken || s == args.batch) return line;
  const CacheFacts facts = cache_facts(args, queries, reports);
  const Mask& mask = args.visibility;
  const Range keys = key_range(mask, {0, facts.queries}, facts.shift, facts.keys);
  if (facts.broken || keys.begin >= keys.end) return line;
  const i32 end = static_cast<i32>(ceil_div(keys.end, i64{kTileKeys}));
  line.tiles = end - first_tile(args, static_cast<i32>(keys.begin));
  if (mask.left < kUnlimited && mask.right < kUnlimited) {
    const i64 reach = mask.left + mask.right + 1 + ceil_div(kBlockQueries - 1, args.group);
    line.tiles = static_cast<i32>(min_of(i64{line.tiles}, reach / kTileKeys + 2 + args.fixed_split));
  }
  return line;
}

template <class T> inline T warp_sum(T x) {
#pragma unroll
  for (int mask = kWarp / 2; mask != 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
  return x;
}

struct RowPlace {
  i32 sequence, kv_head, tile;  // of packed rows
  i64 first;                    // unit
  Cut cut;
};

// What the thread block has of a row: its units [begin, end).
struct Share {
  RowPlace row;
  i32 begin, end;
};

// In shared memory, because the loop over keys needs every register.
struct LineState {
  i32 sequences;
  bool broken;
  Cutting cutting;
  Deal deal;
  i32 first;   // sequence that lane 0 looks at
  i64 before;  // units of the sequences before it
  SequenceLine own[kWarp];
  i64 unit, end;  // that the thread block comes to next, and behind its last
};

// All rows of a call, as the first warp of a block sees them: 32 sequences at a time.
class Line {
 public:
  Line(const DecodeArgs& args, LineState& state) : args_(args), state_(state), kv_heads_(args.heads / args.group) {}

  void make() {
    const bool reports = blockIdx.x == 0;
    i32 sequences = sequences_of(args_);
    bool broken = false;
    if (has_varlen_queries(args_))
      for (i32 s = lane(); s < sequences; s += kWarp) broken |= breaks_bounds(args_, s, reports);
    broken = __any_sync(~0u, broken);
    if (broken) sequences = 1;
    LineTotals totals;
    Cutting cutting{};
    i64 units = 0;
    // Twice over the sequences: how rows are cut follows from all of them, and their units from how they are cut.
    SequenceLine own{0, 0};
    for (int pass = 0; pass < 2; ++pass) {
      for (i32 first = 0; first < sequences; first += kWarp) {
        if (pass == 0 || sequences > kWarp) own = look(first, sequences, broken, reports && pass == 0);
        const i64 rows = i64{own.row_tiles} * kv_heads_;
        totals.rows += rows;
        totals.tiles += rows * max_of(own.tiles, 1);
        totals.longest = max_of(totals.longest, own.tiles);
        units += rows * cut_of(cutting, own.tiles).units;
      }
      if (pass == 1) break;
      totals = {warp_sum(totals.rows), warp_sum(totals.tiles), __reduce_max_sync(~0u, totals.longest)};
      cutting = cutting_of(totals, static_cast<i32>(gridDim.x), args_.splits, args_.fixed_split);
      units = 0;
    }
    units = warp_sum(units);
    const i64 blocks = gridDim.x, number = blockIdx.x;
    const Deal deal = deal_of(units, cutting.even ? clamp_to(units / kLeastEvenTiles, i64{1}, blocks) : blocks);
    state_.own[lane()] = {0, 0};
    if (lane() != 0) return;
    state_.sequences = sequences;
    state_.broken = broken;
    state_.cutting = cutting;
    state_.deal = deal;
    state_.first = -kWarp;  // next() begins with the first sequences
    state_.before = 0;
    state_.unit = cutting.whole_rows() ? number : number < deal.blocks ? deal.start(number) : units;
    state_.end = cutting.whole_rows() || number >= deal.blocks ? units : deal.start(number + 1);
  }

  // What the block works on next; nothing: an empty range of sequence -1.
  Share next() {
    __syncwarp();
    for (;;) {
      const i64 unit = state_.unit, end = state_.end;
      if (unit >= end) return {{-1, 0, 0, 0, {}}, 0, 0};
      const RowPlace row = find(unit);
      const i32 from = static_cast<i32>(unit - row.first);
      const i32 to = static_cast<i32>(min_of(i64{row.cut.pieces}, end - row.first));
      __syncwarp();
      if (lane() == 0) state_.unit = state_.cutting.whole_rows() ? unit + gridDim.x : row.first + row.cut.units;
      __syncwarp();
      if (from < to) return {row, from, to};
    }
  }

 private:
  static i32 lane() { return static_cast<i32>(threadIdx.x % kWarp); }

  SequenceLine look(i32 first, i32 sequences, bool broken, bool reports) const {
    const i32 s = first + lane();
    return s < sequences ? sequence_line(args_, s, broken, reports) : SequenceLine{0, 0};
  }

  // The row that a unit belongs to; units come in rising order.
  RowPlace find(i64 unit) {
    for (;;) {
      const SequenceLine own = state_.own[lane()];
      const i64 units = i64{own.row_tiles} * kv_heads_ * cut_of(state_.cutting, own.tiles).units;
      i64 end = units;
#pragma unroll
      for (int below = 1; below < kWarp; below *= 2) {
        const i64 sum = __shfl_up_sync(~0u, end, below);
        if (lane() >= below) end += sum;
      }
      const i32 first = state_.first;
      const i64 before = state_.before;
      const u32 past = __ballot_sync(~0u, before + end > unit);
      if (past != 0) return place(first, own, __ffs(static_cast<int>(past)) - 1, before + end - units, unit);
      const SequenceLine later = look(first + kWarp, state_.sequences, state_.broken, false);
      const i64 all = __shfl_sync(~0u, end, kWarp - 1);
      state_.own[lane()] = later;
      if (lane() == 0) {
        state_.first = first + kWarp;
        state_.before = before + all;
      }
      __syncwarp();
    }
  }

  RowPlace place(i32 first, const SequenceLine& own, int lane, i64 start, i64 unit) const {
    RowPlace row;
    row.sequence = first + lane;
    row.cut = cut_of(state_.cutting, __shfl_sync(~0u, own.tiles, lane));
    start = __shfl_sync(~0u, start, lane);
    const i32 number = static_cast<i32>((unit - start) / row.cut.units);
    row.first = start + i64{number} * row.cut.units;
    row.kv_head = number % kv_heads_;
    row.tile = number / kv_heads_;
    return row;
  }

  const DecodeArgs& args_;
  LineState& state_;
  i32 kv_heads_;
};

}  // namespace narrows
