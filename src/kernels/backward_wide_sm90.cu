// dK, dV and the parts of dQ on Hopper for head dims above 128, whose dK and dV of 128 keys no thread block has registers for.
//
// Two thread blocks, a cluster, share a block of 128 keys of one kv head: each owns 64 and their dK and dV. Both walk over the
// blocks of query rows that see any of the 128, for each query head of the group; each brings half of a step's Q and dO for
// both. One warpgroup makes S^T = K Q^T, P^T, dP^T = V dO^T and dS^T = P^T (dP^T - delta), P in fp32, and leaves P^T and dS^T in
// shared memory; the next step's S^T is begun before that is done. Two sum half of the columns of dV += P^T dO and dK += dS^T Q each
// (backward_wide_sums_sm90.cuh). dS^T goes to the other thread block as well: each sums half of the columns of dQ = dS K over all
// 128 keys, so that what it adds to the sums in scratch, which is what memory is slowest at, is half of what 64 keys would make.
#include "kernels/backward_wide_sums_sm90.cuh"

namespace narrows {

struct Scorer {
  const Role& role;

  // Rows of the step of which nothing may be read, before and behind: they become rows that weigh nothing. Who sums waits for P.
  Rows seen_rows(i32 first_row) const {
    const i32 begin = clamp_to(role.facts.clean.begin - first_row, 0, kBlockQueries);
    return {begin, clamp_to(role.facts.clean.end - first_row, begin, kBlockQueries)};
  }
  bool is_clean(i32 first_row) const {
    return role.facts.clean.begin <= first_row && first_row + kBlockQueries <= role.facts.clean.end;
  }

  // S^T of a step; it is there behind a wait for all products.
  void begin_step(Scores& s, const Place& place, const Ring& q) const {
    const Shared shared{anew(role.shared.base)};
    const i32 first_row = place.tile * kBlockQueries;
    wait_barrier(shared.queries_full(q.stage), q.phase);
    if (!is_clean(first_row)) {
      const Rows seen = seen_rows(first_row);
      clear_rows<kQueryTile>(shared.queries(q.stage), 0, seen.begin);
      clear_rows<kQueryTile>(shared.queries(q.stage), seen.end, kBlockQueries);
      clear_facts(shared.facts(q.stage), 0, seen.begin);
      clear_facts(shared.facts(q.stage), seen.end, kBlockQueries);
      publish(kScorer);
    }
    begin_scores<kOwnKeyTile, kQueryTile>(s, shared.keys(), shared.queries(q.stage));
  }
  // And dP^T.
  void begin_gradients(Scores& g, i32 first_row, const OutputRing& o) const {
    const Shared shared{anew(role.shared.base)};
    wait_barrier(shared.outputs_full(o.stage), o.phase);
    if (!is_clean(first_row)) {
      const Rows seen = seen_rows(first_row);
      clear_rows<kOutputTile>(shared.outputs(o.stage), 0, seen.begin);
      clear_rows<kOutputTile>(shared.outputs(o.stage), seen.end, kBlockQueries);
      publish(kScorer);
    }
    begin_scores<kOwnValueTile, kOutputTile>(g, shared.values(), shared.outputs(o.stage));
  }

  // Of the score tiles, the lane's.
  int own_row() const { return kWarpRows * role.warp + static_cast<int>(anew(threadIdx.x % 16)); }
  void store_weights(const Operands& p, i32 number) const {
    const int half = half_of(number);
    wait_barrier(role.shared.weights_empty(half), half_phase(number) ^ 1);
    store_operands<kOwnScoreTile>(p, role.shared.weights(half), own_row());
    fence_async_shared();
    __syncwarp();
    if (role.lane == 0) arrive(role.shared.weights_full(half));
  }
  // For who sums dK and dQ here, and dQ there. A warp's rows lie together.
  void store_gradients(const Operands& d, i32 number) const {
    constexpr u32 bytes = kWarpRows * kChunkBytes;
    const int half = half_of(number);
    const u32 own = static_cast<u32>(role.warp) * bytes;
    wait_barrier(role.shared.gradients_empty(half), half_phase(number) ^ 1);
    store_operands<kOwnScoreTile>(d, role.shared.gradients(half), own_row());
    fence_async_shared();
    __syncwarp();
    if (role.lane != 0) return;
    arrive(role.shared.gradients_full(half));
    send_bytes(role.other.other_gradients(half) + own, role.shared.gradients(half) + own, bytes,
               role.other.others_full(half));
  }

  // Of half of the queries: dP^T to dS^T as an operand. Returns the lane's part of dslope.
  template <int half, class Weights>
  float end_half(Operands& operands, Scores& g, const Weights& weights, u32 row_facts, const ScoreRules<float>& rules,
                 const Distances& away) const {
    constexpr int begin = half * kQueryTiles / 2, end = begin + kQueryTiles / 2;
    differentiate_step<begin, end>(g, weights, row_facts + kFactBytes / 2);
    const float slope = kAlibi ? slope_of<begin, end>(g, away) : 0.f;
    if constexpr (kSoftcap) pass_softcap<begin, end>(g, weights, row_facts, rules, away);
    pack_operands<begin, end>(operands, g);
    return slope;
  }

  // s: S^T of the step, begun; it becomes that of the next, begun. Behind the last step it is the last's again, for nobody: a
  // product that is not always made would be waited for. Returns the lane's part of the head's dslope.
  float step(i32 number, bool last, Place& place, Ring& q, const OutputRing& o, Scores& s) const {
    const BackwardSm90Args& args = role.args;
    const Facts& facts = role.facts;
    const Shared& shared = role.shared;
    Scores p, g;
    Operands operands;
    const i32 first_row = place.tile * kBlockQueries, first_key = facts.block.first + role.first_own();
    const ScoreRules<float> rules = HeadRules(args, facts.block.sequence, place.head).scores;
    wait_products<0>();
    pin(s);
    begin_gradients(g, first_row, o);
#pragma unroll
    for (int j = 0; j < kQueryTiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) p[0][j][i] = s[0][j][i];
    if constexpr (kNatural) make_logits(p, rules, Distances(facts.block, first_key, first_row));
    correct_scores(p, args, facts, 0, place);
    const u32 row_facts = shared.facts(q.stage);
    weigh_step(p, args.units.c, row_facts);
    pack_operands(operands, p);
    store_weights(operands, number);
    wait_products<0>();
    pin(g);
    role.release<&Shared::outputs_empty>(o.stage);
    if (!last) {
      place.next(facts.block);
      q.next();
    }
    const auto weights = [&](int tile, int i) { return p[0][tile][i]; };
    const Distances away(facts.block, first_key, first_row);
    float slope = end_half<0>(operands, g, weights, row_facts, rules, away);
    begin_step(s, place, q);
    slope += end_half<1>(operands, g, weights, row_facts, rules, away);
    store_gradients(operands, number);
    return slope;
  }

  // The lanes' parts of a head's dslope are one number of scratch, which begins at 0 and to which the two thread blocks add: of
  // two numbers the order does not matter.
  void store_slope(i32 head, float slope) const {
    const BackwardSm90Args& args = role.args;
    slope = warp_sum(slope);
    meet(1 + kScorer, kWarpgroup);
    if (role.lane == 0) role.facts.slopes[role.warp] = slope;
    meet(1 + kScorer, kWarpgroup);
    if (role.warp != 0 || role.lane != 0) return;
    float sum = 0.f;
    for (float one : role.facts.slopes) sum += one;
    const i64 blocks = is_varlen(args.cu_seqlens_k) ? args.key_blocks : i64{args.batch} * args.key_blocks;
    add_global(&args.slope_sums[head * blocks + role.facts.block.number], sum);
  }

  // Rows of K and V that do not exist.
  void clear_keys() const {
    const i32 begin = clamp_to(role.facts.clean_keys - role.first_own(), 0, kOwnKeys);
    if (begin == kOwnKeys) return;
    clear_rows<kOwnKeyTile>(role.shared.keys(), begin, kOwnKeys);
    clear_rows<kOwnValueTile>(role.shared.values(), begin, kOwnKeys);
    publish(kScorer);
  }

  void run() const {
    const BackwardSm90Args& args = role.args;
    const KeyBlock& block = role.facts.block;
    const i32 steps = step_count(args, block);
    if (steps == 0) {
      if (kAlibi && block.broken && args.slope_sums != nullptr)
        for (i32 head = 0; head < args.group; ++head)
          store_slope(block.kv_head * args.group + head, as_float(0x7fffffffu));
      return;
    }
    wait_barrier(role.shared.keys_full(), 0);
    wait_barrier(role.shared.values_full(), 0);
    clear_keys();
    Place place = first_place(args, block);
    Ring q;
    OutputRing o;
    float slope = 0.f;
    Scores s;
    begin_step(s, place, q);
#pragma unroll 1
    for (i32 number = 0; number < steps; ++number) {
      const i32 head = place.head;
      const bool last = number == steps - 1;
      slope += step(number, last, place, q, o, s);
      o.next();
      if (kAlibi && args.slope_sums != nullptr && (last || place.head != head)) {
        store_slope(head, slope);
        slope = 0.f;
      }
    }
    wait_products<0>();
  }
};

// Deterministic: clusters take key blocks in the order in which they begin, which need not be that of their indices.
inline u32 claim_block(const BackwardArgs& args, Facts& facts, u32 rank) {
  if constexpr (!kDeterministic) return blockIdx.x / kCluster;
  meet_cluster();  // the other runs
  if (rank == 0 && threadIdx.x == 0) {
    facts.index = atomicAdd(args.begun, 1u);
    store_there(address_of(shared_address(&facts.index), 1), facts.index);
  }
  meet_cluster();
  return facts.index;
}

}  // namespace narrows

extern "C" __global__ void __cluster_dims__(narrows::kCluster, 1, 1) __launch_bounds__(narrows::kThreads, 1)
    backward_wide_sm90(const __grid_constant__ narrows::BackwardSm90Args args) {
  using namespace narrows;
  char* const memory = shared_tiles();
  const Shared shared{shared_address(memory)};
  Facts& facts = *reinterpret_cast<Facts*>(memory + kFactsAt);
  const u32 rank = blockIdx.x % kCluster;
  const int warp = static_cast<int>(__shfl_sync(~0u, threadIdx.x / u32{kWarp}, 0));  // uniform, also for the compiler
  let_next_begin();
  if (threadIdx.x == kLoader)
    for (const TensorMap* map : {&args.k_map, &args.v_map, &args.q_map, &args.dout_map}) prefetch_map(*map);
  const KeyBlock block = find_key_block(args, claim_block(args, facts, rank), kLastKeysFirst);
  if (block.rows == 0) return wait_for_previous();  // so that this kernel ends after the one ahead
  if (threadIdx.x == kLoader) {
    if (shared.base % kTileAlignment != 0) __trap();
    init_barriers(shared);
  }
  if (threadIdx.x == 0) find_facts(args, block, facts);
  meet_cluster();
  const Role role{args,
                  facts,
                  shared,
                  {address_of(shared.base, 1 - rank)},
                  static_cast<int>(rank),
                  warp % 4,
                  static_cast<int>(threadIdx.x) % kWarp};
  const int warpgroup = warp / 4;
  if (warpgroup == kScorer) {
    find_rows(args, block, role.first_own(), facts);
    meet(1 + kScorer, kWarpgroup);
    Scorer{role}.run();
    leave_cluster();
  } else if (warpgroup < kQuerySummer) {
    grow_registers<kKeyRegisters>();
    sum_keys(role, warpgroup - kFirstKeySummer);
  } else {
    shrink_registers<kSumRegisters>();
    sum_queries(role);
    leave_cluster();
  }
  __syncwarp();
  await_cluster();  // none ends while the other may still tell it something
}
