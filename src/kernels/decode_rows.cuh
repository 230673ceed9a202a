// The line of work of a call (decode_line.h), made by the first warp of each thread block from lengths that only the device knows.
#pragma once
#include "kernels/cache_sequences.cuh"
#include "shared/decode_line.h"

namespace narrows {

constexpr int kTileKeys = kBlockKeys;

inline bool has_varlen_queries(const DecodeArgs& args) { return args.cu_seqlens_q.data != nullptr; }

inline i32 packed_tiles(const DecodeArgs& args, i32 queries) {
  return static_cast<i32>(ceil_div(static_cast<u32>(queries) * static_cast<u32>(args.group), u32{kBlockQueries}));
}

// Query rows of sequence s; of number `batch`, the rows behind the last one. With broken bounds all rows are sequence 0's.
inline Part query_part(const DecodeArgs& args, i32 s, bool broken) {
  if (broken || !has_varlen_queries(args)) return {s, 0, args.query_rows, broken};
  const i32 begin = at(args.cu_seqlens_q, s), end = s == args.batch ? args.query_rows : at(args.cu_seqlens_q, s + 1);
  return {s, begin, end - begin, false};
}

// The first tile that rows with these keys may read. With a fixed split the tiles begin where the first key's split does.
inline i32 first_tile(const DecodeArgs& args, i32 first_key) {
  const i32 tile = first_key / kTileKeys;
  return args.fixed_split == 0 ? tile : tile / args.fixed_split * args.fixed_split;
}

// Of a sequence.
struct LineSequence : CacheFacts {
  i32 rows;   // query rows that the tensors have
  i32 tiles;  // of keys of each row of the line, at most
};

static_assert(sizeof(LineSequence) == kLineSequenceBytes);

inline i32 tiles_of(const DecodeArgs& args, const CacheFacts& facts) {
  const Mask& mask = args.visibility;
  const Range keys = key_range(mask, {0, facts.queries}, facts.shift, facts.keys);
  if (facts.broken || keys.begin >= keys.end) return 0;
  const i32 end = static_cast<i32>(ceil_div(static_cast<u32>(keys.end), u32{kTileKeys}));
  const i32 tiles = end - first_tile(args, static_cast<i32>(keys.begin));
  if (mask.left >= kUnlimited || mask.right >= kUnlimited) return tiles;
  const i64 reach = mask.left + mask.right + 1 + kBlockQueries / static_cast<u32>(args.group);
  return static_cast<i32>(min_of(i64{tiles}, reach / kTileKeys + 2 + args.fixed_split));
}

inline LineSequence line_sequence(const DecodeArgs& args, i32 s, bool broken, bool reports, bool ahead) {
  const Part queries = query_part(args, s, broken);
  LineSequence line{};
  line.rows = queries.count;
  line.sequence = s;
  line.first_query = queries.begin;
  line.broken = broken;
  if (broken || s == args.batch) return line;
  static_cast<CacheFacts&>(line) = cache_facts(args, queries, reports, ahead);
  line.broken |= is_refused(args, s);
  line.tiles = tiles_of(args, line);
  return line;
}

// A part of a row, that a thread block works on: units [begin, end) of the row's.
struct Share {
  LineSequence sequence;
  i32 kv_head, tile;  // tile: of packed rows
  i32 begin, end;     // none: they are a row's ending
  Cut cut;
  i32 part;  // its number
  PartSlots slots;
};

// In shared memory, because the loop over keys needs every register.
struct LineState {
  bool planned, broken;
  bool found;  // what the block works on next, or that there is nothing
  LineTotals totals;
  Cutting cutting;
  Deal deal;
  i32 sequences;
  i32 first;      // sequence that thread 0 looks at
  i32 before;     // units of the sequences before it
  i32 unit, end;  // that the thread block comes to next, and behind its last
};

inline i32 warp_sum(i32 x) { return static_cast<i32>(__reduce_add_sync(~0u, static_cast<u32>(x))); }

inline i32 sums_below(i32 x) {
#pragma unroll
  for (int below = 1; below < kWarp; below *= 2) {
    const i32 sum = __shfl_up_sync(~0u, x, below);
    if (static_cast<int>(threadIdx.x % kWarp) >= below) x += sum;
  }
  return x;
}

// All rows of a call, as a thread block sees them: as many sequences at a time as it has threads.
class Line {
 public:
  // own: room for the sequences that the threads look at.
  // ahead: lengths may be looked at before the kernel ahead has written them. They are not reported then, whatever they are.
  Line(const DecodeArgs& args, LineState& state, LineSequence* own, bool ahead = false)
      : args_(args), state_(state), own_(own), thread_(static_cast<i32>(threadIdx.x)), ahead_(ahead) {}

  void begin() {
    const i32 sequences = args_.batch + (has_varlen_queries(args_) ? 1 : 0);
    const bool broken = bounds_break(args_, query_bounds(args_), reports());
    if (thread_ != 0) return;
    state_.planned = state_.found = false;
    state_.broken = broken;
    state_.totals = {};
    state_.sequences = broken ? 1 : sequences;
    state_.first = 0;
  }

  // Of a plain call of at most as many sequences as there are threads, whose line is planned: whether it stands now that the kernel
  // ahead has ended. What breaks a rule is looked at again, since it may be reported now. A barrier. If not, begin() again.
  bool stands() {
    ahead_ = false;
    bool differs = false;
    if (thread_ < args_.batch) {
      const LineSequence& own = own_[thread_];
      differs = own.broken || (args_.cache_seqlens.data && at(args_.cache_seqlens, thread_, true) != own.filled);
    }
    return __syncthreads_or(differs) == 0;
  }

  // By a block that has used the room that it gave: what find() needs of it is looked up again. Between barriers.
  void look_again() {
    if (state_.planned) look();
  }

  // What the block works on next; of kv head -1: nothing. Where it is found, the first warp goes on with gather(whether it is of
  // other rows of q than what the block worked on before).
  template <class Gather> void next(Share& share, const Gather& gather) {
#pragma unroll 1
    for (;;) {
      __syncthreads();
      if (thread_ < kWarp && state_.planned) {
        const bool same = find_beside(share);
        if (same || find(share)) gather(!same);
      }
      __syncthreads();
      if (state_.found) return;
      look();
    }
  }

 private:
  bool reports() const { return blockIdx.x == 0 && !ahead_; }
  i32 rows_of(const LineSequence& sequence) const { return packed_tiles(args_, sequence.rows) * args_.kv_heads; }

  // At the next sequences. How rows are cut follows from all of them.
  void look() {
    const i32 s = state_.first + thread_;
    LineSequence own{};
    if (s < state_.sequences) own = line_sequence(args_, s, state_.broken, reports() && !state_.planned, ahead_);
    own_[thread_] = own;
    if (state_.planned) return;
    const i32 rows = rows_of(own), some = max_of(own.tiles, 1);
    const LineTotals totals{warp_sum(rows), warp_sum(rows * some),
                            args_.fixed_split == 0 ? 0 : warp_sum(rows * ceil_div(some, args_.fixed_split)),
                            __reduce_max_sync(~0u, own.tiles)};
    if (thread_ % kWarp == 0) {
      atomicAdd(&state_.totals.rows, totals.rows);
      atomicAdd(&state_.totals.tiles, totals.tiles);
      atomicAdd(&state_.totals.pieces, totals.pieces);
      atomicMax(&state_.totals.longest, totals.longest);
    }
    __syncthreads();
    if (thread_ != 0) return;
    state_.first += kThreads;
    if (state_.first >= state_.sequences) plan();
  }

  void plan() {
    const i32 blocks = args_.line_blocks, number = static_cast<i32>(blockIdx.x);
    const Cutting cutting = cutting_of(state_.totals, blocks, args_.splits, args_.fixed_split);
    const i32 units = units_of(state_.totals, cutting);
    state_.cutting = cutting;
    state_.unit = number;
    state_.end = units;
    if (cutting.even) {
      const Deal deal = deal_of(units, clamp_to(units / kLeastEvenTiles, 1, blocks));
      state_.deal = deal;
      state_.unit = number < deal.blocks ? deal.start(number) : units;
      state_.end = number < deal.blocks ? deal.start(number + 1) : units;
    }
    // All sequences may still be in sight; else the first ones are looked at again.
    state_.first = state_.sequences <= kThreads ? 0 : -kThreads;
    state_.before = 0;
    state_.planned = true;
  }

  // By the first warp: the row behind the last one, if it differs in its kv head alone. Most rows of ragged batches do.
  bool find_beside(Share& share) {
    const i32 unit = state_.unit, left = state_.end - unit, kv_head = share.kv_head + 1;
    const bool beside = state_.found && state_.cutting.even && left > 0 && kv_head < args_.kv_heads;
    __syncwarp();
    if (beside && thread_ == 0) {
      const i32 pieces = share.cut.pieces;
      share.kv_head = kv_head;
      share.begin = share.part = 0;
      share.end = min_of(pieces, left);
      share.slots = share.end == pieces ? PartSlots{1, 0, 0, 0} : stretch_slots(state_.deal, unit, pieces);
      state_.unit = unit + share.cut.units;
    }
    __syncwarp();
    return beside;
  }

  // By the first warp: the sequence of the next unit, if it is in sight.
  bool find(Share& share) {
    const i32 unit = state_.unit, first = state_.first;
    i32 before = state_.before;
    const bool ends = unit >= state_.end || first >= state_.sequences;
    __syncwarp();
    if (ends && thread_ == 0) share.kv_head = -1;
    bool found = ends;
#pragma unroll 1
    for (i32 from = 0; !found && first >= 0 && from < min_of(i32{kThreads}, state_.sequences - first); from += kWarp) {
      const LineSequence& own = own_[from + thread_];
      const Cut cut = cut_of(state_.cutting, own.tiles);
      const i32 units = rows_of(own) * cut.units, end = before + sums_below(units);
      const u32 past = __ballot_sync(~0u, end > unit);
      found = past != 0;
      if (found && thread_ == __ffs(static_cast<int>(past)) - 1) place(share, own, cut, end - units, unit);
      before = __shfl_sync(~0u, end, kWarp - 1);
    }
    if (thread_ == 0) {
      state_.found = found;
      if (!found) {
        state_.first = first + kThreads;
        state_.before = before;
      }
    }
    __syncwarp();
    return found && !ends;
  }

  // By the thread that has the sequence. Units of a row's ending are nobody's work.
  void place(Share& share, const LineSequence& own, const Cut& cut, i32 start, i32 unit) {
    const i32 number = static_cast<i32>(static_cast<u32>(unit - start) / static_cast<u32>(cut.units));
    const i32 first = start + number * cut.units;
    const auto [tile, kv_head] = args_.by_tile_rows.divide(number);
    share.sequence = own;
    share.kv_head = kv_head;
    share.tile = tile;
    share.cut = cut;
    share.begin = unit - first;
    if (state_.cutting.even) {
      state_.unit = first + cut.units;
      share.end = min_of(cut.pieces, state_.end - first);
      share.slots = stretch_slots(state_.deal, first, cut.pieces);
      share.part = static_cast<i32>(blockIdx.x) - share.slots.other / 2;
    } else {
      state_.unit = unit + args_.line_blocks;
      share.end = share.begin + 1;
      share.slots = unit_slots(first, cut.pieces);
      share.part = share.begin;
    }
  }

  const DecodeArgs& args_;
  LineState& state_;
  LineSequence* const own_;
  const i32 thread_;
  bool ahead_;
};

}  // namespace narrows
