// O = softmax(scale * Q K^T) V and its LSE on Hopper: wgmma on tiles that the copy engine brings.
//
// Warps of a thread block have roles. One schedules: it takes tiles (some query rows of one head) and finds out which keys they see;
// a thread of another loads K and V, a thread of a third loads Q. The warpgroups before them compute, 64 query rows each: S = Q K^T
// and O += P V by wgmma, the softmax between the two in registers. A tile's blocks of keys are walked from the last to the first.
// Thread blocks stay on their multiprocessors and take tile after tile: the next one's Q and first K come while this one ends.
#include "kernels/copy_tile.cuh"
#include "kernels/pipeline_sm90.cuh"
#include "kernels/score_rules.cuh"
#include "kernels/softmax.cuh"

namespace narrows {

// ------------------------------------------------------------------------------------------------------------------ bring

inline void schedule(const Shared& shared, TileFacts* slots, Scheduler& scheduler) {
  for (u32 round = 0;; ++round) {
    const int slot = static_cast<int>(round % kFactSlots);
    wait_barrier(shared.facts_empty(slot), (round / kFactSlots & 1) ^ 1);
    scheduler.find(slots[slot]);
    __syncwarp();
    const bool exists = slots[slot].exists;
    if (lane_index() == 0) arrive(shared.facts_full(slot));
    if (!exists) break;
    scheduler.advance();
  }
}

// A tile, in boxes of 64 columns.
template <SmemTile tile> inline void load_tile(u32 to, const TensorMap& map, u32 barrier, BoxPlace from, u64 hint) {
  arrive_expecting(barrier, static_cast<u32>(tile.bytes()));
  for (int chunk = 0; chunk < tile.row_bytes / kChunkBytes; ++chunk, from.column += kChunkColumns)
    load_box(to + static_cast<u32>(chunk * tile.rows * kChunkBytes), map, barrier, from, hint);
}

// The next free stage gets rows of K or V.
template <SmemTile tile>
inline void load_stage(const Stages& stages, Ring& ring, const TensorMap& map, const BoxPlace& from) {
  wait_barrier(stages.empty_barrier(ring), ring.phase ^ 1);
  load_tile<tile>(stages.tile(ring), map, stages.full_barrier(ring), from, kEvictLast);
  ring.next();
}

// One thread; K is one block ahead of V.
inline void bring_keys_and_values(const Shared& shared, const TileFacts* slots, const ForwardSm90Args& args) {
  prefetch_map(args.k_map);
  prefetch_map(args.v_map);
  Ring k, v;
  for (FactsReader reader{shared, slots};; ++reader.round) {
    const TileFacts& facts = reader.wait();
    if (!facts.exists) break;
    const i32 sequence = is_varlen(args.cu_seqlens_k) ? 0 : facts.block.sequence;
    const BoxPlace origin{0, facts.block.first_key, facts.block.head / args.group, sequence};
    const auto place = [&](i32 n) { return BoxPlace{0, origin.row + n * kBlockKeys, origin.head, origin.sequence}; };
    const Keys blocks = facts.blocks;
    reader.release();
    load_stage<kKeyStage>(shared.keys(), k, args.k_map, place(blocks.end - 1));
    for (i32 n = blocks.end - 1; n >= blocks.begin; --n) {
      if (n > blocks.begin) load_stage<kKeyStage>(shared.keys(), k, args.k_map, place(n - 1));
      load_stage<kValueStage>(shared.values(), v, args.v_map, place(n));
    }
  }
}

// One thread of another warp, so that a Q that is still in use never holds up K and V.
inline void bring_queries(const Shared& shared, const TileFacts* slots, const ForwardSm90Args& args) {
  prefetch_map(args.q_map);
  for (FactsReader reader{shared, slots};; ++reader.round) {
    const TileFacts& facts = reader.wait();
    if (!facts.exists) break;
    BoxPlace from{0, facts.block.first_query + facts.block.first_row, facts.block.head,
                  is_varlen(args.cu_seqlens_q) ? 0 : facts.block.sequence};
    reader.release();
    for (int w = 0; w < kWarpgroups; ++w, from.row += kPartRows) {
      wait_barrier(shared.query_empty(w), (reader.round & 1) ^ 1);
      load_tile<kQueryPart>(shared.query_part(w), args.q_map, shared.query_full(w), from, kEvictFirst);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------- compute

constexpr bool kPinnedWait = kTilesBeforeWait >= 0;
constexpr int kEarlyTiles = kPinnedWait ? kTilesBeforeWait : kKeyTiles;
// Named barriers: 1 + w passes the tensor cores to warpgroup w, 1 + kWarpgroups + w is warpgroup w's own.
constexpr int kTurn = 1, kOwn = 1 + kWarpgroups, kTwoWarpgroups = 2 * kWarpgroup;

// A tile's registers, one thread's part. Arrays alone, and no array elsewhere: one beside scalars that live through the loop keeps
// these in memory until the loops are unrolled, and the code differs.
struct Fragments {
  Outputs o;
  Scores s;                   // then weights
  u32 p[kBlockKeys / 16][4];  // weights as the first operand
  float factor[kRows], subtrahend[kRows];
  Softmax softmax;
};

using QueryFragments = u32[kHeadDim / 16][4];

struct Computer {
  Ring k, v;
  Shared shared;
  const ForwardSm90Args& args;
  int warpgroup, warp, lane;  // warp within its warpgroup
  QueryFragments& q;          // when kQueriesInRegisters

  bool leads() const { return warp == 0 && lane == 0; }
  void release(u32 barrier) const {
    if (lane == 0) arrive(barrier);
  }
  // This lane's row of the 8x8 matrices at units `unit` and `unit + 1` of the warp's 16 rows.
  u32 matrix_row(u32 part, const SmemTile& tile, int unit) const {
    return part + tile.offset(16 * warp + lane % 16, unit + lane / 16);
  }

  void load_queries() const {
    const u32 part = shared.query_part(warpgroup);
#pragma unroll
    for (int i = 0; i < kHeadDim / 16; ++i) load_matrices(matrix_row(part, kQueryPart, 2 * i), q[i]);
    if constexpr (kOwnOutputTile) {
      __syncwarp();
      release(shared.query_empty(warpgroup));
    }
  }

  void wait_keys() const { wait_barrier(shared.keys().full_barrier(k), k.phase); }
  void wait_values() const { wait_barrier(shared.values().full_barrier(v), v.phase); }

  // S = Q K^T: begun here, there after a wait.
  void begin_scores(Scores& s) const {
    const u64 b = descriptor_along_rows(shared.keys().tile(k));
    if constexpr (kQueriesInRegisters) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 16; ++i) multiply_scores(s, q[i], b + step_along_rows(kKeyStage, i), i > 0);
    } else {
      const u64 a = descriptor_along_rows(shared.query_part(warpgroup));
#pragma unroll
      for (int i = 0; i < kHeadDim / 16; ++i)
        multiply_scores(s, a + step_along_rows(kQueryPart, i), b + step_along_rows(kKeyStage, i), i > 0);
    }
    commit_products();
  }
  void end_scores(Scores& s) {
    pin(s);
    release(shared.keys().empty_barrier(k));
    k.next();
  }

  // O += P V: begun here, there when nothing is in flight.
  void begin_output(Fragments& f) const {
    const u64 b = descriptor_down_columns(shared.values().tile(v), kValueStage);
#pragma unroll
    for (int i = 0; i < kBlockKeys / 16; ++i) multiply_output(f.o, f.p[i], b + step_down_columns(i), 1);
    commit_products();
  }
  void end_output(Fragments& f) {
    wait_products<0>();
    pin(f.o);
    release(shared.values().empty_barrier(v));
    v.next();
  }

  static void pack_weights(Fragments& f) {
#pragma unroll
    for (int i = 0; i < kBlockKeys / 16; ++i)
#pragma unroll
      for (int n = 0; n < 4; ++n)
        f.p[i][n] = pack(f.s[0][2 * i + n / 2][n % 2 * 2], f.s[0][2 * i + n / 2][n % 2 * 2 + 1]);
  }

  template <bool partial> void make_scores(Fragments& f, const TileFacts& facts, const HeadRules& rules, i32 n) const {
    if constexpr (kNatural) make_logits(f.s, facts.block, rules, 0, n * kBlockKeys);
    if constexpr (partial && kLimitsKeys) hide_unseen(f.s, facts.rows, n * kBlockKeys);
    if constexpr (partial && !kLimitsKeys)
#pragma unroll
      for (int r = 0; r < kRows; ++r) hide_unseen(f.s, r, {0, facts.block.keys}, n * kBlockKeys);
  }

  // The last block of keys: no O to accumulate yet.
  void first_step(Fragments& f, const TileFacts& facts, const HeadRules& rules, i32 n) {
    wait_keys();
    pin(f.s);
    fence_products();
    begin_scores(f.s);
    wait_products<0>();
    end_scores(f.s);
    make_scores<true>(f, facts, rules, n);
    raise_reference(f.softmax, f.s, f.factor, f.subtrahend, args.units);
    weigh(f.softmax, f.s, f.subtrahend, args.units);
    pack_weights(f);
    if (kPinnedWait && n > facts.blocks.begin) wait_keys();
  }

  // S of block n and O += P V of block n + 1 in flight together, then the softmax of block n beside the second. more: a block is
  // to follow.
  template <bool partial> void step(Fragments& f, const TileFacts& facts, const HeadRules& rules, i32 n, bool more) {
    if constexpr (!kPinnedWait) wait_keys();
    meet(kTurn + warpgroup, kTwoWarpgroups);
    pin(f.s);
    pin(f.o);
    fence_products();
    begin_scores(f.s);
    wait_values();
    fence_products();  // without it ptxas adds one and warns (C7519)
    begin_output(f);
    pass(kTurn + (warpgroup + 1) % kWarpgroups, kTwoWarpgroups);
    wait_products<1>();
    end_scores(f.s);
    make_scores<partial>(f, facts, rules, n);
    raise_reference(f.softmax, f.s, f.factor, f.subtrahend, args.units);
    weigh<0, kEarlyTiles>(f.softmax, f.s, f.subtrahend, args.units);
    if constexpr (kPinnedWait) {
      // ptxas moves the wait for P V up over arithmetic, not out of its basic block: the wait for the next K, a branch, holds it
      // here, where P V is just done and the other weights can mix with the rescaling of O.
      pin(f.s);
      if (more) wait_keys();
      end_output(f);
    }
    weigh<kEarlyTiles, kKeyTiles>(f.softmax, f.s, f.subtrahend, args.units);
    if constexpr (!kPinnedWait) end_output(f);
    pack_weights(f);
    scale_rows(f.o, f.factor);
  }

  // O += P V of the first block, with nothing beside it.
  void last_step(Fragments& f) {
    if constexpr (kOwnOutputTile && !kQueriesInRegisters) release(shared.query_empty(warpgroup));
    wait_values();
    pin(f.o);
    fence_products();
    begin_output(f);
    end_output(f);
  }

  // Zeros in the rows of V that may hold anything, each warpgroup for itself.
  void clear_values(const Keys& clean, i32 n) const {
    const i32 first = n * kBlockKeys;
    if (clean.begin <= first && first + kBlockKeys <= clean.end) return;
    constexpr int units = kValueStage.row_bytes / kUnitBytes;
    const u32 tile = shared.values().tile(v);
    wait_values();
    for (i32 index = kWarp * warp + lane; index < kBlockKeys * units; index += kWarpgroup) {
      const i32 row = index / units, key = first + row;
      if (key < clean.begin || clean.end <= key)
        store_shared128(tile + kValueStage.offset(row, index % units), {0, 0, 0, 0});
    }
    fence_async_shared();
    meet(kOwn + warpgroup, kWarpgroup);
  }

  void attend(Fragments& f, const TileFacts& facts) {
    const HeadRules rules(args, facts.block.sequence, facts.block.head);
    const Keys blocks = facts.blocks, common = facts.common[warpgroup];
    i32 n = blocks.end - 1;
    first_step(f, facts, rules, n);
    clear_values(facts.clean, n);
    if constexpr (kLimitsKeys) {
      // Partial blocks at the end, whole ones, and in the second round partial ones at the beginning.
      const i32 whole = max_of(ceil_div(common.begin, kBlockKeys), blocks.begin);
      for (i32 partial = max_of(common.end / kBlockKeys, blocks.begin);; partial = blocks.begin) {
#pragma unroll 1
        while (n > partial) {
          --n;
          step<true>(f, facts, rules, n, n > blocks.begin);
        }
#pragma unroll 1
        while (n > whole) {
          --n;
          step<false>(f, facts, rules, n, n > blocks.begin);
        }
        if (n == blocks.begin) break;
      }
      clear_values(facts.clean, n);
    } else {
#pragma unroll 1
      while (n > 0) {
        --n;
        step<false>(f, facts, rules, n, n > 0);
      }
    }
    last_step(f);
  }

  // Stores the LSE and finishes O. Where no key weighs it is 0, which NaN from V must not become.
  void finish_rows(Fragments& f, const QueryBlock& block) const {
    const LanePlace place;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const RowResult result = row_result(args, block, place.row(r), f.softmax, r);
      store_lse(args.lse, block, place.row(r), result.lse);
      f.factor[r] = result.factor;
    }
#pragma unroll
    for (int j = 0; j < kValueTiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) f.o[0][j][i] = f.factor[i / 2] == 0.f ? 0.f : f.o[0][j][i] * f.factor[i / 2];
  }

  void stage_output(const Fragments& f, u32 part) const {
#pragma unroll
    for (int j = 0; j < kValueTiles; j += 2) {
      const auto pair = [&](int n) { return pack(f.o[0][j + n / 2][n % 2 * 2], f.o[0][j + n / 2][n % 2 * 2 + 1]); };
      store_matrices(matrix_row(part, kOutputPart, j), pair(0), pair(1), pair(2), pair(3));
    }
  }

  // O to shared memory and from there by the engine, which leaves out what is behind the tensor. A varlen sequence may end before
  // the tensor: of its last rows each warp stores its own.
  void store_output(const Fragments& f, const QueryBlock& block) const {
    const u32 part = shared.output_part(warpgroup);
    if constexpr (kOwnOutputTile) {  // the last tile's O has left it
      if (leads()) wait_stores_read();
      meet(kOwn + warpgroup, kWarpgroup);
    }
    stage_output(f, part);
    const i32 first = warpgroup * kPartRows, row = block.first_query + block.first_row + first;
    const bool by_engine = !is_varlen(args.cu_seqlens_q) || block.rows - first >= kPartRows;
    if (!by_engine) {
      __syncwarp();
      const GlobalRows to = rows_of(args.o, block.sequence, row + 16 * warp, block.head, args.value_dim);
      store_rows<kOutputPart>(part, 16 * warp, min_of(block.rows - first - 16 * warp, 16), to);
    }
    fence_async_shared();
    meet(kOwn + warpgroup, kWarpgroup);
    if (!leads()) return;
    if (by_engine) {
      const i32 sequence = is_varlen(args.cu_seqlens_q) ? 0 : block.sequence;
      for (int chunk = 0; chunk < kOutputPart.row_bytes / kChunkBytes; ++chunk)
        store_box(args.o_map, part + static_cast<u32>(chunk * kPartRows * kChunkBytes),
                  {chunk * kChunkColumns, row, block.head, sequence});
      commit_stores();
    }
    if constexpr (!kOwnOutputTile) {
      wait_stores_read();
      arrive(shared.query_empty(warpgroup));
    }
  }
};

inline void compute(const Shared& shared, const TileFacts* slots, const ForwardSm90Args& args, int warp, int lane) {
  const int warpgroup = warp / 4;
  QueryFragments q;
  Computer computer{
      .k = {}, .v = {}, .shared = shared, .args = args, .warpgroup = warpgroup, .warp = warp % 4, .lane = lane, .q = q};
  if (warpgroup == kWarpgroups - 1) pass(kTurn, kTwoWarpgroups);  // warpgroup 0 has the first turn
  for (FactsReader reader{shared, slots};; ++reader.round) {
    const TileFacts& facts = reader.wait();
    if (!facts.exists) break;
    Fragments f;
#pragma unroll
    for (int j = 0; j < kValueTiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) f.o[0][j][i] = 0.f;
    wait_barrier(shared.query_full(warpgroup), reader.round & 1);
    if constexpr (kQueriesInRegisters) computer.load_queries();
    computer.attend(f, facts);
    computer.finish_rows(f, facts.block);
    computer.store_output(f, facts.block);
    __syncwarp();
    if (lane == 0) reader.release();
  }
  if (computer.leads()) wait_stores();
}

}  // namespace narrows

extern "C" __global__ void __launch_bounds__(narrows::kThreads, 1)
    forward_sm90(const __grid_constant__ narrows::ForwardSm90Args args) {
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
    compute(shared, slots, args, warp, lane);
  } else {
    shrink_registers<kBringRegisters>();
    if (warp == kWarps) {
      Scheduler scheduler(args, broken);
      schedule(shared, slots, scheduler);
    } else if (warp == kWarps + 1 && lane == 0) {
      bring_keys_and_values(shared, slots, args);
    } else if (warp == kWarps + 2 && lane == 0) {
      bring_queries(shared, slots, args);
    }
  }
}
