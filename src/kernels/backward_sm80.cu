// dK, dV and the parts of dQ, by recomputation, on every GPU since Ampere.
//
// A thread block keeps some keys of one kv head on chip, and their dK and dV in registers, and walks over the blocks of query
// rows that see any of them, for each query head of the group. A step: S^T = K Q^T, P^T from it and the rows' LSE,
// dP^T = V dO^T, dS^T = P^T (dP^T - delta), dV += P^T dO, dK += dS^T Q, and dQ += dS K, which other thread blocks add to as
// well: in fp32, in scratch. Q and dO of the next step are on their way meanwhile.
// dQ of a step comes one step later, so that one barrier a step is enough: it shows the new Q and dO, and the dS of before.
// Where warps exchange scores (kExchanges) two barriers are needed anyway, and dQ comes at once.
// Shared memory: K, V, the stages of Q and dO, dS^T (one or two), P^T if it is exchanged, rows' facts, what each row sees.
#include "kernels/backward_scores.cuh"
#include "kernels/copy_tile.cuh"

namespace narrows {

constexpr int kStageBytes = kQueryTile.bytes() + kOutputTile.bytes();
constexpr int kLookers = ceil_div(kBlockQueries, kWarp);  // warps that find what the rows see

// Of a query block: whether some row sees a key of this block, and whether some sees not all.
struct Sight {
  bool any, partial;
};

// In shared memory, because the loop needs every register.
struct Facts {
  KeyBlock block;
  Sight sights[kStages][kLookers];
  float slopes[kWarps];
  u32 index;
};

struct Call {
  const BackwardArgs& args;
  Facts& facts;
  u32 tiles;  // their shared address

  u32 keys() const { return tiles; }
  u32 values() const { return tiles + kKeyTile.bytes(); }
  u32 queries(i32 step) const {
    return tiles + kKeyTile.bytes() + kValueTile.bytes() + static_cast<u32>(step % kStages * kStageBytes);
  }
  u32 outputs(i32 step) const { return queries(step) + kQueryTile.bytes(); }
  u32 gradients(i32 step) const {
    return tiles + kKeyTile.bytes() + kValueTile.bytes() + kStages * kStageBytes +
           (kExchanges ? 0u : static_cast<u32>(step % 2 * kScoreTile.bytes()));
  }
  u32 weights() const { return gradients(0) + kScoreTile.bytes(); }
  u32 rows(i32 step) const {
    return gradients(0) + 2 * kScoreTile.bytes() + static_cast<u32>(step % kStages * kBlockQueries) * sizeof(RowFacts);
  }
  u32 seen(i32 step) const { return rows(step) + kStages * kBlockQueries * static_cast<u32>(sizeof(RowFacts)); }
};

// A step's query head and block of query rows.
struct Place {
  i32 head, tile;

  Place next(const KeyBlock& block) const {
    return tile + 1 < block.end_tile ? Place{head, tile + 1} : Place{head + 1, block.begin_tile};
  }
};

inline void load_keys(const Call& call) {
  const BackwardArgs& args = call.args;
  const KeyBlock& block = call.facts.block;
  const i32 kept = max_of(block.keys - block.first, 0);
  copy_tile<kKeyTile>(call.keys(),
                      rows_of(args.k, block.sequence, block.first_key + block.first, block.kv_head, args.head_dim), 0,
                      0, kept);
  copy_tile<kValueTile>(call.values(),
                        rows_of(args.v, block.sequence, block.first_key + block.first, block.kv_head, args.value_dim),
                        0, 0, kept);
}

// What the rows of the step see, for the lanes that hold their scores.
inline void look(const Call& call, i32 step, i32 first_row) {
  const KeyBlock& block = call.facts.block;
  const i32 row = static_cast<i32>(threadIdx.x);
  if (row >= kLookers * kWarp) return;
  const bool exists = row < kBlockQueries && first_row + row < block.queries;
  const Keys seen = exists ? seen_keys(call.args, block, first_row + row) : Keys{0, 0};
  if (row < kBlockQueries)
    store_shared64(call.seen(step) + static_cast<u32>(row) * sizeof(Keys), static_cast<u32>(seen.begin),
                   static_cast<u32>(seen.end));
  const i32 end = block.first + kBlockKeys;
  const bool any = seen.begin < min_of(seen.end, end) && seen.end > block.first;
  const Sight sight{__any_sync(~0u, any) != 0,
                    __any_sync(~0u, exists && (seen.begin > block.first || seen.end < end)) != 0};
  if (row % kWarp == 0) call.facts.sights[step % kStages][row / kWarp] = sight;
}

inline void load_step(const Call& call, i32 step, const Place& place) {
  const BackwardArgs& args = call.args;
  const KeyBlock& block = call.facts.block;
  const i32 first_row = place.tile * kBlockQueries, rows = block.queries - first_row;
  copy_tile<kQueryTile>(call.queries(step),
                        rows_of(args.q, block.sequence, block.first_query + first_row, place.head, args.head_dim), 0, 0,
                        rows);
  copy_tile<kOutputTile>(call.outputs(step),
                         rows_of(args.dout, block.sequence, block.first_query + first_row, place.head, args.value_dim),
                         0, 0, rows);
  const RowFacts* const facts = args.rows + query_block_number(args, block, place.head, place.tile) * kBlockQueries;
  const i32 pair = static_cast<i32>(threadIdx.x) * 2;
  if (pair < kBlockQueries)
    copy_async<16>(call.rows(step) + static_cast<u32>(pair) * sizeof(RowFacts), facts + pair, true);
  commit_copies();
  look(call, step, first_row);
}

inline Sight sight_of(const Call& call, i32 step) {
  Sight all = call.facts.sights[step % kStages][0];
#pragma unroll
  for (int w = 1; w < kLookers; ++w) {
    const Sight& one = call.facts.sights[step % kStages][w];
    all = {all.any || one.any, all.partial || one.partial};
  }
  return all;
}

// P^T, ready to multiply dO, and dS^T of a step. Returns the lane's part of dslope.
inline float make_scores(const Call& call, i32 step, const Place& place, bool partial, const HeadRules& rules,
                         const DropoutRule& dropout, Scores& p, Scores& g) {
  const BackwardArgs& args = call.args;
  const KeyBlock& block = call.facts.block;
  const LanePlace lane;
  const i32 first_row = place.tile * kBlockQueries;
  multiply_rows<kKeyTile, kQueryTile>(p, call.keys(), lane.first_key(), call.queries(step), lane.first_query());
  Tangents tangents;
  if constexpr (kNatural) make_logits(p, tangents, args, block, rules.scores, place.head, first_row);
  const char* const lse = args.lse.data + block.sequence * args.lse.strides[0] + place.head * args.lse.strides[1] +
                          (block.first_query + first_row) * args.lse.strides[2];
  weigh(p, args, call.rows(step), lse, block.queries - first_row);
  if (partial) hide_unseen(p, call.seen(step), block.first);
  if constexpr (kMask) hide_masked(p, args, block, place.head, first_row);
  multiply_rows<kValueTile, kOutputTile>(g, call.values(), lane.first_key(), call.outputs(step), lane.first_query());
  Kept kept;
  if constexpr (kDropout) kept = Kept(dropout, block.sequence, place.head, first_row, block.first);
  const float slope = differentiate(g, p, tangents, kept, args, block, call.rows(step), first_row);
  if constexpr (kDropout) drop(p, kept);
  return slope;
}

// Deterministic: key blocks add to a query block in their order. A warp waits for the same warp of the key block before, which
// adds to the same place, and no other. That one began earlier (claim_block), so it is running or done: no wait is for ever.
inline u32* turn_of(const Call& call, const Place& place) {
  return call.args.turns + query_block_number(call.args, call.facts.block, place.head, place.tile) * kWarps +
         threadIdx.x / kWarp;
}
inline void await_turn(const Call& call, const Place& place) {
  const KeyBlock& block = call.facts.block;
  const u32 turn = static_cast<u32>(block.first / kBlockKeys - first_key_block(call.args, block, place.tile));
  if (threadIdx.x % kWarp == 0)
    while (load_acquire(turn_of(call, place)) != turn) {
    }
  __syncwarp();
}
inline void pass_turn(const Call& call, const Place& place) {
  __threadfence();
  __syncwarp();
  if (threadIdx.x % kWarp == 0) store_release(turn_of(call, place), *turn_of(call, place) + 1);
}

// dQ += dS K of a step.
inline void add_queries(const Call& call, i32 step, const Place& place) {
  const LanePlace lane;
  const int row_tile = lane.warp / kSumColumnWarps * kSumRowTiles;
  const SumPart part(lane.warp % kSumColumnWarps);
  if (call.args.query_sums == nullptr || row_tile * 16 >= kBlockQueries || !part.exists()) return;
  QuerySums sums = {};
  add_crossed<kScoreTile, kKeyTile>(sums, call.gradients(step), row_tile * 16 * kElementBytes / kUnitBytes,
                                    part.start(call.keys()), part.unit());
  float* const to =
      call.args.query_sums + query_block_number(call.args, call.facts.block, place.head, place.tile) * kSumsOfBlock;
  if constexpr (kDeterministic) await_turn(call, place);
  const int column_tile = part.first / kElementBytes / 8;
#pragma unroll
  for (int t = 0; t < kSumRowTiles; ++t)
#pragma unroll
    for (int n = 0; n < SumPart::tiles; ++n) {
      if (SumPart::tiles * kSumColumnWarps * 8 > kHeadDim && column_tile + n >= kHeadDim / 8) break;
      if constexpr (kVectorSums) {
        add_global4(to + sum_place(row_tile + t, column_tile + n, lane.lane, 0), sums[t][n]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          add_global(to + sum_place(row_tile + t, column_tile + n, lane.lane, i), sums[t][n][i]);
      }
    }
  if constexpr (kDeterministic) pass_turn(call, place);
}

// The lanes' parts of a head's dslope are one number of scratch.
inline void store_slope(const Call& call, i32 head, float slope) {
  const BackwardArgs& args = call.args;
#pragma unroll
  for (int mask = 1; mask < kWarp; mask *= 2) slope += lane_xor(slope, mask);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) call.facts.slopes[threadIdx.x / kWarp] = slope;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float sum = 0.f;
  for (int w = 0; w < kWarps; ++w) sum += call.facts.slopes[w];
  const i64 blocks = is_varlen(args.cu_seqlens_k) ? args.key_blocks : i64{args.batch} * args.key_blocks;
  args.slope_sums[head * blocks + call.facts.block.number] = sum;
}

// dV += P^T dO and dK += dS^T Q of a warp that holds P^T and dS^T: they are operands as they are.
inline void add_own(const Call& call, i32 step, const Scores& p, const Scores& g, KeySums& dk, ValueSums& dv) {
  add_product<kOutputTile>(dv, p, call.outputs(step));
  add_product<kQueryTile>(dk, g, call.queries(step));
}

// The same of warps that have left their parts of P^T and dS^T in shared memory.
inline void add_exchanged(const Call& call, i32 step, KeySums& dk, ValueSums& dv) {
  const LanePlace lane;
  const HeadPart head(lane.column_warp());
  const ValuePart value(lane.column_warp());
  if (value.exists())
    add_rows<kScoreTile, kOutputTile>(dv, call.weights(), lane.first_key(), value.start(call.outputs(step)));
  if (head.exists())
    add_rows<kScoreTile, kQueryTile>(dk, call.gradients(step), lane.first_key(), head.start(call.queries(step)));
}

struct Walk {
  Place place;
  float slope;     // of the head so far, this lane's part
  Place before;    // the step before
  bool owes_sums;  // of dQ
};

// A step that some row sees a key of.
inline void compute(const Call& call, i32 step, bool partial, const DropoutRule& dropout, Walk& walk, KeySums& dk,
                    ValueSums& dv) {
  const HeadRules rules(call.args, call.facts.block.sequence, walk.place.head);
  Scores p, g;
  if (!kExchanges || LanePlace().column_warp() < kScoreWarps) {
    walk.slope += make_scores(call, step, walk.place, partial, rules, dropout, p, g);
    store_scores(call.gradients(step), g);
    if constexpr (kExchanges) store_scores(call.weights(), p);
  }
  if constexpr (kExchanges) {
    __syncthreads();  // the scores are whole
    add_exchanged(call, step, dk, dv);
    add_queries(call, step, walk.place);
  } else {
    add_own(call, step, p, g, dk, dv);
  }
}

// All steps: the query heads of the group, and for each the query blocks that see these keys.
inline void walk_queries(const Call& call, KeySums& dk, ValueSums& dv) {
  const BackwardArgs& args = call.args;
  const KeyBlock& block = call.facts.block;
  const DropoutRule dropout = kDropout ? dropout_rule(args) : DropoutRule{};
  const i32 steps = args.group * (block.end_tile - block.begin_tile);
  Walk walk{{block.kv_head * args.group, block.begin_tile}, 0.f, {}, false};
  if (steps > 0) load_step(call, 0, walk.place);
  for (i32 step = 0; step < steps; ++step) {
    wait_copies<0>();
    __syncthreads();  // Q and dO have come for all, all have left those of the step before, and its dS^T is whole
    const Place next = walk.place.next(block);
    if (kStages > 1 && step + 1 < steps) load_step(call, step + 1, next);
    const Sight sight = sight_of(call, step);
    if (walk.owes_sums) add_queries(call, step - 1, walk.before);
    if (sight.any || kDeterministic) compute(call, step, sight.partial, dropout, walk, dk, dv);
    walk.owes_sums = !kExchanges && (sight.any || kDeterministic);
    if (kStages == 1) {
      __syncthreads();  // all have left Q and dO
      if (step + 1 < steps) load_step(call, step + 1, next);
    }
    if (kAlibi && args.slope_sums != nullptr && (next.head != walk.place.head)) {
      store_slope(call, walk.place.head, walk.slope);
      walk.slope = 0.f;
    }
    walk.before = walk.place;
    walk.place = next;
  }
  __syncthreads();
  if (walk.owes_sums) add_queries(call, steps - 1, walk.before);
}

// Sums of a warp to a tile of results, whose rows are keys.
template <SmemTile tile, class Part, int C>
inline void stage_results(u32 to, const float (&sums)[kRowTiles][C][4], const Part& part, float factor,
                          const KeyBlock& block) {
  const LanePlace place;
  const float nan = as_float(0x7fffffffu);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool exists = block.first + place.key(r) < block.keys;
#pragma unroll
    for (int n = 0; n < C; ++n) {
      const int byte = part.first + (8 * n + place.lane % 4 * 2) * kElementBytes;
      if (byte >= tile.row_bytes) break;
      float pair[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) pair[e] = block.broken ? nan : exists ? sums[r / 2][n][r % 2 * 2 + e] * factor : 0.f;
      const u32 at = to + tile.offset(place.key(r), byte / kUnitBytes) + static_cast<u32>(byte % kUnitBytes);
      if constexpr (kElement == Element::fp32)
        store_shared64(at, as_bits(pair[0]), as_bits(pair[1]));
      else
        store_shared(at, pack(pair[0], pair[1]));
    }
  }
}

// dK and dV take the places of K and V.
inline void store_results(const Call& call, const KeySums& dk, const ValueSums& dv) {
  const BackwardArgs& args = call.args;
  const KeyBlock& block = call.facts.block;
  const LanePlace place;
  __syncthreads();  // all have left K and V
  stage_results<kKeyTile>(call.keys(), dk, HeadPart(place.column_warp()), args.rules.scale, block);
  stage_results<kValueTile>(call.values(), dv, ValuePart(place.column_warp()),
                            kDropout ? keep_factor<float>(args.dropout) : 1.f, block);
  __syncthreads();
  constexpr int rows = ceil_div(kBlockKeys, kWarps);
  const int first = place.warp * rows, count = min_of(block.rows - first, rows);
  const i32 row = block.first_key + block.first + first;
  if (args.dk.data)
    store_any_rows<kKeyTile>(call.keys(), first, count,
                             rows_of(args.dk, block.sequence, row, block.kv_head, args.head_dim));
  if (args.dv.data)
    store_any_rows<kValueTile>(call.values(), first, count,
                               rows_of(args.dv, block.sequence, row, block.kv_head, args.value_dim));
}

// Deterministic: thread blocks take key blocks in the order in which they begin, which need not be that of their indices.
inline u32 claim_block(const Call& call) {
  if constexpr (!kDeterministic) return blockIdx.x;
  if (threadIdx.x == 0) call.facts.index = atomicAdd(call.args.begun, 1u);
  __syncthreads();
  return call.facts.index;
}

}  // namespace narrows

extern "C" __global__ void __launch_bounds__(narrows::kThreads, narrows::kBlocksOfMultiprocessor)
    backward_sm80(const __grid_constant__ narrows::BackwardArgs args) {
  using namespace narrows;
  extern __shared__ __align__(128) char tiles[];
  __shared__ Facts facts;
  const Call call{args, facts, shared_address(tiles)};
  const KeyBlock block = find_key_block(args, claim_block(call));
  if (block.rows == 0) return;
  if (threadIdx.x == 0) facts.block = block;
  __syncthreads();
  KeySums dk = {};
  ValueSums dv = {};
  if (block.begin_tile < block.end_tile) {
    load_keys(call);
    walk_queries(call, dk, dv);
  }
  store_results(call, dk, dv);
}
