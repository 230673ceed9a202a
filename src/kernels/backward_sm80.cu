// dK, dV and the parts of dQ, by recomputation, on every GPU since Ampere.
//
// A thread block keeps some keys of one kv head on chip, and their dK and dV in registers, and walks over the blocks of query
// rows that see any of them, for each query head of the group. A step: S^T = K Q^T, P^T from it and the rows' LSE,
// dP^T = V dO^T, dS^T = P^T (dP^T - delta), dV += P^T dO, dK += dS^T Q, and dQ += dS K, which other thread blocks add to as
// well: in fp32, in scratch. Q and dO of the next step are on their way meanwhile.
// dQ of a step comes one step later, so that one barrier a step is enough: it shows the new Q and dO, and the dS of before.
// Where warps exchange scores (kExchanges) two barriers are needed anyway, and dQ comes at once.
// Shared memory: K, V, the stages of Q, those of dO, dS^T (one or two), P^T if it is exchanged, rows' facts, what each row sees.
#include "kernels/backward_step.cuh"

namespace narrows {

static_assert(kExchanges || kStages == 2, "dQ comes a step later");

// Deterministic: key blocks add to some query blocks, a group, in their order. A warp waits for the same warp of the key block
// before, which adds to the same places, and no other. That one began earlier (claim_block), so it is running or done: no wait
// is for ever.
// A group is also how far key blocks of a head are apart: what they read and add to on that way must stay in L2. Of the default's
// rate, groups of 128 and 256 rows, 8k causal: 0.85, 0.87 at 128 columns, 0.87, 0.69 at 256.
constexpr i32 kGroup = max_of((kHeadDim < 192 ? 256 : 128) / kBlockQueries, 1);  // query blocks

struct Turn {
  u32* at = nullptr;
  u32 number = 0, seen = 0;
};
struct Turns {
  Turn now, before;
};

inline bool begins_group(const KeyBlock& block, i32 tile) { return tile % kGroup == 0 || tile == block.begin_tile; }
inline bool ends_group(const KeyBlock& block, i32 tile) {
  return tile % kGroup == kGroup - 1 || tile == block.end_tile - 1;
}

// Whose turn it is, asked long before it must be known.
inline Turn ask_turn(const Call& call, const Place& place) {
  const BackwardArgs& args = call.args;
  const KeyBlock& block = call.facts.block;
  const i32 first = place.tile / kGroup * kGroup;
  const i32 turn = block.first / kBlockKeys - first_key_block(args, block, first, kGroup);
  u32* const at = args.turns + query_block_number(args, block, place.head, first) * kWarps + threadIdx.x / kWarp;
  return {at, static_cast<u32>(turn), load_relaxed(at)};
}

// The warp adds only once it has seen the number, and what others added before was made by the memory before their number was
// stored: a branch is enough of an order here, and ld.acquire would empty the L1.
inline void await_turn(Turn& turn) {
  while (turn.seen != turn.number) turn.seen = load_relaxed(turn.at);
  __syncwarp();
}

// A step later, when what the warp has added is there: at once it would wait for that.
inline void pass_turn(Turn& turn) {
  if (turn.at == nullptr) return;
  __syncwarp();
  if (threadIdx.x % kWarp == 0) store_release(turn.at, turn.number + 1);
  turn = {};
}

// A warp's part of dQ of a step, on its way to scratch.
struct QueryPart {
  QuerySums sums = {};
  float* to = nullptr;  // null: there is none
  int row_tile, column_tile;
};

// dS K of a step, or the columns of one pass.
inline QueryPart multiply_gradients(const Call& call, i32 step, const Place& place, int pass, Turns& turns) {
  const LanePlace lane;
  const SumPart part(lane.warp % kSumColumnWarps + pass * kSumColumnWarps);
  if (kDeterministic && pass == 0) pass_turn(turns.before);
  QueryPart result;
  result.row_tile = lane.warp / kSumColumnWarps * kSumRowTiles;
  result.column_tile = part.first / kElementBytes / 8;
  if (call.args.query_sums == nullptr || result.row_tile * 16 >= kBlockQueries || !part.exists()) return result;
  add_crossed<kScoreTile>(result.sums, call.gradients(step), result.row_tile * 16 * kElementBytes / kUnitBytes,
                          call.keys(), part);
  result.to =
      call.args.query_sums + query_block_number(call.args, call.facts.block, place.head, place.tile) * kSumsOfBlock;
  if (kDeterministic && pass == 0) {
    await_turn(turns.now);
    if (ends_group(call.facts.block, place.tile)) turns.before = turns.now;
  }
  return result;
}

// Sends accumulators [begin, end) of the part. Many at once would hold up all that goes to memory, shared memory too.
inline void send(const QueryPart& part, int begin, int end) {
  if (part.to == nullptr) return;
  const LanePlace lane;
#pragma unroll
  for (int t = 0; t < kSumRowTiles; ++t)
#pragma unroll
    for (int n = 0; n < SumPart::tiles; ++n) {
      if (t * SumPart::tiles + n < begin || t * SumPart::tiles + n >= end) continue;
      const int column_tile = part.column_tile + SumPart::away(n) / kElementBytes / 8;
      if constexpr (kVectorSums) {
        add_global4(part.to + sum_place(part.row_tile + t, column_tile, lane.lane, 0), part.sums[t][n]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          add_global(part.to + sum_place(part.row_tile + t, column_tile, lane.lane, i), part.sums[t][n][i]);
      }
    }
}

// dQ += dS K of a step.
inline void add_queries(const Call& call, i32 step, const Place& place, Turns& turns) {
  for (int pass = 0; pass < kSumPasses; ++pass) {
    const QueryPart part = multiply_gradients(call, step, place, pass, turns);
    send(part, 0, kSumRowTiles * SumPart::tiles);
  }
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

struct Walk {
  Place place, next;
  bool more;       // after this step
  float slope;     // of the head so far, this lane's part
  Place before;    // the step before
  bool owes_sums;  // of dQ
  Turns turns;
};

// dV += P^T dO and dK += dS^T Q of a warp that holds P^T and dS^T: they are operands as they are. dQ is left for later.
inline void add_own(const Call& call, i32 step, Scores& p, Scores& g, KeySums& dk, ValueSums& dv) {
  if constexpr (!kExchanges) {
    store_scores(call.gradients(step), g);
    add_product<kOutputTile>(dv, p, call.outputs(step));
    add_product<kQueryTile>(dk, g, call.queries(step));
  }
}

// All three sums, by warps that each have made a part of P^T and dS^T or none. A tile that has one stage is loaded as soon as
// all have left it. dQ leaves while dV and dK are summed.
inline void add_exchanged(const Call& call, i32 step, Walk& walk, KeySums& dk, ValueSums& dv) {
  const LanePlace lane;
  const HeadPart head(lane.column_warp());
  const ValuePart value(lane.column_warp());
  constexpr int parts = 2 * kBlockQueries / kDepth, sums = kSumRowTiles * SumPart::tiles;
  __syncthreads();  // the scores are whole
  QueryPart dq;
  if constexpr (kSumPasses == 1)
    dq = multiply_gradients(call, step, walk.place, 0, walk.turns);
  else
    add_queries(call, step, walk.place, walk.turns);
  add_rows<kScoreTile>(dv, call.weights(), lane.first_key(), call.outputs(step), value,
                       [&](int n) { send(dq, n * sums / parts, (n + 1) * sums / parts); });
  if constexpr (kStages == 1) {
    __syncthreads();
    if (walk.more) load_outputs(call, step + 1, walk.next);
  }
  add_rows<kScoreTile>(dk, call.gradients(step), lane.first_key(), call.queries(step), head,
                       [&](int n) { send(dq, (n + parts / 2) * sums / parts, (n + parts / 2 + 1) * sums / parts); });
  if constexpr (kStages == 1) {
    __syncthreads();
    if (walk.more) load_queries(call, step + 1, walk.next);
  }
}

inline void step_once(const Call& call, i32 step, const DropoutRule& dropout, Walk& walk, KeySums& dk, ValueSums& dv) {
  const Sight sight = sight_of(call, step);
  // A turn must be taken, and a single stage filled again, whatever is seen.
  const bool computed = sight.any || kDeterministic || kStages == 1;
  if (walk.owes_sums) add_queries(call, step - 1, walk.before, walk.turns);
  if (kDeterministic && begins_group(call.facts.block, walk.place.tile)) walk.turns.now = ask_turn(call, walk.place);
  if (computed && (!kExchanges || LanePlace().column_warp() < kScoreWarps)) {
    Scores p, g;
    Tangents tangents;
    make_gradients(call, step, walk.place, sight.partial || call.facts.far, dropout, p, g, tangents);
    if constexpr (kAlibi) walk.slope += slope_of(g, call.facts.block, walk.place.tile * kBlockQueries);
    if constexpr (kSoftcap) pass_softcap(g, tangents);
    add_own(call, step, p, g, dk, dv);
    if constexpr (kExchanges) {
      store_scores(call.weights(), p);
      store_scores(call.gradients(step), g);
    }
  }
  if (kExchanges && computed) add_exchanged(call, step, walk, dk, dv);
  walk.owes_sums = !kExchanges && computed;
}

// All steps: the query heads of the group, and for each the query blocks that see these keys.
inline void walk_queries(const Call& call, KeySums& dk, ValueSums& dv) {
  const BackwardArgs& args = call.args;
  const KeyBlock& block = call.facts.block;
  const DropoutRule dropout = kDropout ? dropout_rule(args) : DropoutRule{};
  const i32 steps = args.group * (block.end_tile - block.begin_tile);
  Walk walk{{block.kv_head * args.group, block.begin_tile}, {}, true, 0.f, {}, false, {}};
  load_queries(call, 0, walk.place);
  load_outputs(call, 0, walk.place);
  for (i32 step = 0; step < steps; ++step) {
    wait_copies<0>();
    __syncthreads();  // Q and dO have come for all, all have left those of the step before, and its dS^T is whole
    walk.next = walk.place.next(block);
    walk.more = step + 1 < steps;
    if (kStages > 1 && walk.more) {
      load_queries(call, step + 1, walk.next);
      load_outputs(call, step + 1, walk.next);
    }
    step_once(call, step, dropout, walk, dk, dv);
    if (kAlibi && args.slope_sums != nullptr && walk.next.head != walk.place.head) {
      store_slope(call, walk.place.head, walk.slope);
      walk.slope = 0.f;
    }
    walk.before = walk.place;
    walk.place = walk.next;
  }
  __syncthreads();
  if (walk.owes_sums) add_queries(call, steps - 1, walk.before, walk.turns);
  if constexpr (kDeterministic) pass_turn(walk.turns.before);
}

// Sums of a warp to a tile of results, whose rows are keys.
template <SmemTile tile, class Part, int C>
inline void stage_results(u32 to, const float (&sums)[kRowTiles][C][4], const Part& part, float factor,
                          const KeyBlock& block) {
  if (!part.exists()) return;
  const LanePlace place;
  const float nan = as_float(0x7fffffffu);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool exists = block.first + place.key(r) < block.keys;
#pragma unroll
    for (int n = 0; n < C; ++n) {
      const int byte = part.first + Part::away(n) + place.lane % 4 * 2 * kElementBytes;
      float pair[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) pair[e] = block.broken ? nan : exists ? sums[r / 2][n][r % 2 * 2 + e] * factor : 0.f;
      const u32 at = to + tile.offset(place.key(r), byte / kUnitBytes) + static_cast<u32>(byte % kUnitBytes);
      store_pair(at, pair[0], pair[1]);
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
  if (threadIdx.x == 0) {
    facts.block = block;
    facts.far = !kNatural && *args.far_rows != 0;
  }
  __syncthreads();
  KeySums dk = {};
  ValueSums dv = {};
  if (block.begin_tile < block.end_tile && args.group > 0) {
    load_keys(call);
    walk_queries(call, dk, dv);
  }
  if (kAlibi && block.broken && args.slope_sums != nullptr)
    for (i32 head = 0; head < args.group; ++head)
      store_slope(call, block.kv_head * args.group + head, as_float(0x7fffffffu));
  store_results(call, dk, dv);
}
