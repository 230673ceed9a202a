// O = softmax(scale * Q K^T) V and its LSE on Hopper: wgmma on tiles that the copy engine brings.
//
// Warps of a thread block have roles. One schedules: it takes tiles (some query rows of one head) and finds out which
// keys they see; a thread of another loads K and V, a thread of a third loads Q. The warpgroups before them compute, 64
// query rows each: S = Q K^T and O += P V by wgmma, the softmax between the two in registers. A tile's blocks of keys
// are walked from the last to the first. Thread blocks stay on their multiprocessors and take tile after tile: the next
// one's Q and first K come while this one ends.
#include "kernels/bring_cached_sm90.cuh"
#include "kernels/score_rules.cuh"
#include "kernels/warpgroup_sm90.cuh"

namespace narrows {

constexpr bool kPinnedWait = kTilesBeforeWait >= 0;
constexpr int kEarlyTiles = kPinnedWait ? kTilesBeforeWait : kKeyTiles;
// A warpgroup that has no row of a tile passes over its blocks of keys but for the last one. Where there are two, a
// sequence's last tile alone has such a one, if it has up to 64 rows; calls over caches may have no others. Where every
// key is seen it loses 1 to 2%.
constexpr bool kPassesOver = kCached || (kWarpgroups > 2 && kLimitsKeys);

struct Computer : Warpgroup {
  template <bool partial> void make_scores(Fragments& f, const TileFacts& facts, const HeadRules& rules, i32 n) const {
    if constexpr (kNatural) make_logits(f.s, facts.block, rules, 0, n * kBlockKeys);
    if constexpr (partial && kLimitsKeys) hide_unseen(f.s, rows(), n * kBlockKeys);
    if constexpr (partial && !kLimitsKeys)
#pragma unroll
      for (int r = 0; r < kRows; ++r) hide_unseen(f.s, r, {0, facts.block.keys}, n * kBlockKeys);
  }

  void end_first_scores(Fragments& f, const TileFacts& facts) {
    wait_products<0>();
    const Keys blocks = blocks_of(facts);
    end_scores(f.s, blocks.begin + 1 < blocks.end);
#pragma unroll 1
    for (i32 left = skipped(facts); left > 0; --left) {
      skip_turn();
      skip_values();
    }
  }

  // S of a tile's last block of keys.
  void begin_tile(Fragments& f, const TileFacts& facts) {
    take_queries();
    pass_keys(facts);
    wait_keys();
    pin(f.s);
    fence_products();
    begin_scores(f.s);
    end_first_scores(f, facts);
  }

  void look_at_rows(const TileFacts& facts) const {
    const i32 row = warpgroup * kPartRows + 16 * warp + lane;
    __syncwarp();
    if (lane < 16) rows()[row] = facts.block.first_row + row < facts.block.queries ? facts.sight.of(row) : Keys{0, 0};
    __syncwarp();
  }

  // That block's weights; there is no O yet.
  void first_step(Fragments& f, const TileFacts& facts, const HeadRules& rules, i32 n) {
    f.softmax = {};
    make_scores<true>(f, facts, rules, n);
    raise_reference(f.softmax, f.s, f.factor, f.subtrahend, args.units);
    weigh(f.softmax, f.s, f.subtrahend, args.units);
    pack_weights(f);
  }

  // S of block n and O += P V of block n + 1 in flight together, then the softmax of block n beside the second. more: a
  // block is to follow; adds: there is an O.
  template <bool partial>
  void step(Fragments& f, const TileFacts& facts, const HeadRules& rules, i32 n, bool more, bool adds) {
    wait_keys();
    take_turn();
    pin(f.s);
    pin(f.o);
    fence_products();
    begin_scores(f.s);
    wait_values();
    fence_products();  // without it ptxas adds one and warns (C7519)
    begin_output(f, adds);
    pass_turn();
    wait_products<1>();
    end_scores(f.s, more);
    make_scores<partial>(f, facts, rules, n);
    raise_reference(f.softmax, f.s, f.factor, f.subtrahend, args.units);
    weigh<0, kEarlyTiles>(f.softmax, f.s, f.subtrahend, args.units);
    if constexpr (kPinnedWait) {
      pin(f.s);
      hold_schedule(args.tiles);
      end_output(f);
    }
    weigh<kEarlyTiles, kKeyTiles>(f.softmax, f.s, f.subtrahend, args.units);
    if constexpr (!kPinnedWait) end_output(f);
    pack_weights(f);
    scale_rows(f.o, f.factor);
  }

  // Zeros in the rows of V that may hold anything, each warpgroup for itself.
  void clear_values(const Keys& clean, i32 n) const {
    if constexpr (kGathers) return;  // they came as zeros
    const i32 first = n * kBlockKeys;
    if (clean.begin <= first && first + kBlockKeys <= clean.end) return;
    constexpr int units = kValueStage.row_bytes / kUnitBytes;
    const u32 tile = shared.values().tile(v);
    wait_values();
#pragma unroll 1
    for (i32 index = kWarp * warp + lane_index(); index < kBlockKeys * units; index += kWarpgroup) {
      const i32 row = index / units, key = first + row;
      if (key < clean.begin || clean.end <= key)
        store_shared128(tile + kValueStage.offset(row, index % units), {0, 0, 0, 0});
    }
    fence_async_shared();
    meet(kOwn + warpgroup, kWarpgroup);
  }

  // Without a row of the tile: block n becomes the first one.
  void pass_over(const TileFacts& facts, i32& n) {
    const i32 first = blocks_of(facts).begin, last = n;
    if (warpgroup * kPartRows < facts.block.queries - facts.block.first_row) return;
#pragma unroll 1
    for (; n > first; --n) {
      skip_keys();
      skip_turn();
      skip_values();
    }
    if (!kQueriesInRegisters && first < last) drop_queries();
  }

  void attend(Fragments& f, const TileFacts& facts) {
    const HeadRules rules(args, facts.block.sequence, facts.block.head);
    const Keys blocks = blocks_of(facts);
    const i32 last = blocks.end - 2;  // whose step makes O
    i32 n = blocks.end - 1;
    if constexpr (kLimitsKeys) look_at_rows(facts);
    first_step(f, facts, rules, n);
    clear_values(facts.clean, n);
    if constexpr (kPassesOver) pass_over(facts, n);
    if constexpr (kLimitsKeys) {
      // Partial blocks at the end, whole ones, and in the second round partial ones at the beginning.
      const Keys common = facts.common[warpgroup];
      const i32 whole = max_of(ceil_div(common.begin, kBlockKeys), blocks.begin);
      for (i32 partial = max_of(common.end / kBlockKeys, blocks.begin);; partial = blocks.begin) {
#pragma unroll 1
        while (n > partial) {
          --n;
          step<true>(f, facts, rules, n, n > blocks.begin, n < last);
        }
#pragma unroll 1
        while (n > whole) {
          --n;
          step<false>(f, facts, rules, n, n > blocks.begin, n < last);
        }
        if (n == blocks.begin) break;
      }
      clear_values(facts.clean, n);
      if (skips_first(facts)) {
        skip_turn();
        skip_keys();
      }
    } else {
#pragma unroll 1
      while (n > 0) {
        --n;
        step<false>(f, facts, rules, n, n > 0, n < last);
      }
    }
  }

  // Stores the LSE, and finds what O is multiplied by. Of a quad's two rows a lane works one out: as few instructions
  // as may be, since those of a tile's end are not in the cache when they are needed.
  void finish_rows(Fragments& f, const QueryBlock& block) const {
    const int r = lane % 2;
    const i32 row = LanePlace().row(r);
    const float sums[kRows] = {quad_sum(f.softmax.sum[0]), quad_sum(f.softmax.sum[1])};
    const RowResult result =
        row_result(args, block, row, r ? f.softmax.maximum[1] : f.softmax.maximum[0], r ? sums[1] : sums[0]);
    store_lse(args.lse, block, row, result.lse, r);
#pragma unroll
    for (int n = 0; n < kRows; ++n) f.factor[n] = as_float(__shfl_sync(~0u, as_bits(result.factor), n, 2));
  }

  // Columns from 8 first to 8 end.
  void stage_output(Fragments& f, u32 part, int first, int end) const {
    const auto row = matrix_row<kOutputPart>(part);
    // Where no key weighs O is 0, which NaN from V must not become.
    if (__any_sync(~0u, f.factor[0] == 0.f || f.factor[1] == 0.f))
#pragma unroll
      for (int j = first; j < end; ++j)
#pragma unroll
        for (int i = 0; i < 4; ++i) f.o[0][j][i] = f.factor[i / 2] == 0.f ? 0.f : f.o[0][j][i];
#pragma unroll
    for (int j = first; j < end; j += 2) {
      const auto pair = [&](int n) {
        const float(&x)[4] = f.o[0][j + n / 2];
        return pack(x[n % 2 * 2] * f.factor[n % 2], x[n % 2 * 2 + 1] * f.factor[n % 2]);
      };
      store_matrices(row.at(j - first, 0), pair(0), pair(1), pair(2), pair(3));
    }
  }

  // O to shared memory and from there by the engine, which leaves out what is behind the tensor. A varlen sequence may
  // end before the tensor: of its last rows each warp stores its own.
  void store_columns(Fragments& f, const QueryBlock& block, int begin) const {
    const u32 part = shared.output_part(warpgroup);
    if constexpr (kOwnOutputTile) {  // the last tile's O has left it
      if (leads()) wait_stores_read();
      meet(kOwn + warpgroup, kWarpgroup);
    }
    stage_output(f, part, begin / 8, min_of(begin + kOutputColumns, kValueDim) / 8);
    const i32 first = warpgroup * kPartRows, row = block.first_query + block.first_row + first;
    const bool by_engine = !is_varlen(args.cu_seqlens_q) || block.rows - first >= kPartRows;
    if (!by_engine) {
      __syncwarp();
      GlobalRows to = rows_of(args.o, block.sequence, row + 16 * warp, block.head, args.value_dim - begin);
      to.first += begin * kElementBytes;
      store_rows<kOutputPart>(part, 16 * warp, min_of(block.rows - first - 16 * warp, 16), to);
    }
    fence_async_shared();
    meet(kOwn + warpgroup, kWarpgroup);
    if (!leads()) return;
    if (by_engine) {
      const i32 sequence = is_varlen(args.cu_seqlens_q) ? 0 : block.sequence;
      for (int chunk = 0; chunk < kOutputPart.row_bytes / kChunkBytes; ++chunk)
        store_box(args.o_map, part + static_cast<u32>(chunk * kPartRows * kChunkBytes),
                  {begin + chunk * kChunkColumns, row, block.head, sequence});
      commit_stores();
    }
    if constexpr (!kOwnOutputTile) {
      wait_stores_read();
      arrive(shared.query_empty(warpgroup, q));
    }
  }
  void store_output(Fragments& f, const QueryBlock& block) const {
#pragma unroll
    for (int begin = 0; begin < kValueDim; begin += kOutputColumns) store_columns(f, block, begin);
  }

  // The end of a tile: O += P V of its first block of keys.
  void end_tile(Fragments& f, const QueryBlock& block, bool skips, bool adds) {
    wait_values();
    pin(f.o);
    fence_products();
    begin_output(f, adds);
    end_output(f);
    if (skips) skip_values();
    finish_rows(f, block);
    store_output(f, block);
    if constexpr (!kOwnOutputTile) q.next();
  }

  // Gives up a tile's facts as soon as may be: the next but one is taken into their place.
  const QueryBlock& note_ending(const FactsReader& last) const {
    const u32* const from = reinterpret_cast<const u32*>(&last.facts().block);
    if (lane < static_cast<int>(sizeof(QueryBlock) / 4)) reinterpret_cast<u32*>(ending())[lane] = from[lane];
    __syncwarp();
    if (lane == 0) last.release();
    return *ending();
  }

  // The same with the next tile's beginning in flight: O is finished and stored beside it.
  void cross(Fragments& f, const FactsReader& last, const TileFacts& next) {
    const bool skips = skips_first(last.facts()), adds = !has_one(last.facts());
    const QueryBlock& block = note_ending(last);
    if constexpr (kOwnOutputTile && kQueryStages == 1 && !kQueriesInRegisters) {
      take_turn();
      wait_values();
      pin(f.o);
      fence_products();
      begin_output(f, adds);
      pass_turn();
      take_queries();  // which were asked for no sooner than this tile's last S
      pass_keys(next);
      wait_keys();
      pin(f.s);
      fence_products();
      begin_scores(f.s);
      end_output<1>(f);
      if (skips) skip_values();
      finish_rows(f, block);
      store_output(f, block);
      end_first_scores(f, next);
    } else if constexpr (kOwnOutputTile) {
      take_queries();
      pass_keys(next);
      wait_keys();
      take_turn();
      wait_values();
      pin(f.s);
      pin(f.o);
      fence_products();
      begin_output(f, adds);
      begin_scores(f.s);
      pass_turn();
      end_output<1>(f);
      if (skips) skip_values();
      finish_rows(f, block);
      store_output(f, block);
      end_first_scores(f, next);
    } else {
      end_tile(f, block, skips, adds);
      begin_tile(f, next);
    }
  }
};

inline void compute(const Shared& shared, char* memory, const ForwardSm90Args& args, int warp, int lane) {
  const int warpgroup = warp / 4;
  QueryFragments fragments;
  Computer computer{{.q = {},
                     .k = {},
                     .v = {},
                     .shared = shared,
                     .args = args,
                     .memory = memory,
                     .warpgroup = warpgroup,
                     .warp = warp % 4,
                     .lane = lane,
                     .fragments = fragments}};
  if (kTakesTurns && warpgroup == kWarpgroups - 1) pass(kTurn, kTwoWarpgroups);  // warpgroup 0 has the first turn
  Fragments f;
  FactsReader reader{shared, reinterpret_cast<const TileFacts*>(memory + kFactsAt)};
  for (;; ++reader.round) {
    const TileFacts& facts = reader.wait();
    if (!facts.exists) break;
    if (reader.round == 0)
      computer.begin_tile(f, facts);
    else
      computer.cross(f, reader.last(), facts);
    computer.attend(f, facts);
  }
  if (reader.round > 0) {
    const TileFacts& facts = reader.last().facts();
    computer.end_tile(f, facts.block, computer.skips_first(facts), !computer.has_one(facts));
  }
  if (computer.leads()) wait_stores();
}

}  // namespace narrows

extern "C" __global__ void __launch_bounds__(narrows::kThreads, 1)
    forward_sm90(const __grid_constant__ narrows::KernelArgs args) {
  using namespace narrows;
  extern __shared__ __align__(kTileAlignment) char memory[];
  const Shared shared{shared_address(memory)};
  TileFacts* const slots = reinterpret_cast<TileFacts*>(memory + kFactsAt);
  const int warp = static_cast<int>(__shfl_sync(~0u, threadIdx.x / u32{kWarp}, 0));  // uniform, also for the compiler
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if (threadIdx.x == 0) {
    if (shared.base % kTileAlignment != 0) __trap();
    init_barriers(shared);
  }
  const bool broken = bounds_break(args, query_bounds(args), blockIdx.x == 0);
  __syncthreads();
  if (warp < kWarps) {
    grow_registers<kComputeRegisters>();
    compute(shared, memory, args, warp, lane);
  } else {
    shrink_registers<kBringRegisters>();
    if (warp == kWarps) {
      Scheduler scheduler(args, broken);
      schedule(shared, slots, scheduler);
    } else if (!kCached && warp == kWarps + 1 && lane == 0) {
      bring_keys_and_values(shared, slots, args);
    } else if (warp == kWarps + 2 && lane == 0) {
      bring_queries(shared, slots, args);
    } else if constexpr (kCached) {
      bring_cached(shared, slots, cached_args(args), warp - kWarps);
    }
  }
}
