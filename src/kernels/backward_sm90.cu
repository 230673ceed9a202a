// dK, dV and the parts of dQ on Hopper, by recomputation: wgmma on tiles that the copy engine brings.
//
// A thread block keeps 128 keys of one kv head on chip and walks over the blocks of query rows that see any of them, for
// each query head of the group, as backward_sm80.cu does. Two warpgroups own 64 keys each: S^T = K Q^T, P^T from it and the
// rows' LSE, dP^T = V dO^T, dS^T = P^T (dP^T - delta), dV += P^T dO and dK += dS^T Q, with P^T and dS^T from registers. In the
// loop they meet at turns alone. A third (backward_sums_sm90.cuh) multiplies dQ = dS K out of the dS^T that both leave in shared
// memory, and adds it to the sums in scratch, to which other thread blocks add as well; one of its threads brings all tiles.
#include "kernels/backward_results_sm90.cuh"
#include "kernels/backward_sums_sm90.cuh"
#include "kernels/backward_weights_sm90.cuh"

namespace narrows {

struct KeyComputer {
  const BackwardSm90Args& args;
  Facts& facts;
  Shared shared;
  int warpgroup, warp, lane;  // warp within its warpgroup

  u32 own_rows(u32 tile) const { return tile + static_cast<u32>(warpgroup * kPartRows * kChunkBytes); }

  // From S to dV the products of a step are begun in a turn. Left alone both warpgroups go side by side (230 clocks apart of an
  // instrumented step's 4,270): their products wait for each other, and the tensor cores for the exponentials of both. At 128
  // columns and 4k a call takes 0.976 of the time without a mask, 0.982 with a causal one.
  void take_turn() const {
    if constexpr (kTakesTurns) meet(kTurn + warpgroup, kTwoWarpgroups);
  }
  void pass_turn() const {
    if constexpr (kTakesTurns) pass(kTurn + (warpgroup + 1) % kKeyWarpgroups, kTwoWarpgroups);
  }

  // 64 keys by all columns, over the queries.
  template <SmemTile step, int n> void begin_sums(float (&sums)[1][n][4], const Operands& a, u32 queries) const {
    const u64 b = descriptor_down_columns(queries, step);
    pin(sums);
    fence_products();
#pragma unroll
    for (int i = 0; i < kBlockQueries / 16; ++i) multiply_sums(sums, a[i], b + step_down_columns(i), 1);
    commit_products();
  }

  // Rows of Q, dO and facts of which nothing may be read become rows that weigh nothing, each warpgroup for itself.
  void clear_unseen(i32 first_row, const Ring& ring) const {
    wait_barrier(shared.outputs_full(ring.stage), ring.phase);
    const i32 begin = clamp_to(facts.clean.begin - first_row, 0, kBlockQueries);
    const i32 end = clamp_to(facts.clean.end - first_row, begin, kBlockQueries);
    clear_step(ring.stage, 0, begin);
    clear_step(ring.stage, end, kBlockQueries);
    publish(warpgroup);
  }
  void clear_step(int stage, i32 begin, i32 end) const {
    clear_rows<kQueryTile>(shared.queries(stage), begin, end);
    clear_rows<kOutputTile>(shared.outputs(stage), begin, end);
    clear_facts(shared.facts(stage), begin, end);
  }
  // dS^T to shared memory, for dQ.
  void store_gradients(const Operands& a, i32 number) const {
    const int half = half_of(number), row = kPartRows * warpgroup + 16 * warp + lane % 16;
    wait_barrier(shared.gradients_empty(half), half_phase(number) ^ 1);
    store_operands<kScoreTile>(a, shared.gradients(half), row);
    fence_async_shared();
    __syncwarp();
    if (lane == 0) arrive(shared.gradients_full(half));
  }

  // Returns the lane's part of the head's dslope.
  float step(i32 number, const Place& place, const Ring& ring, KeySums& dk, ValueSums& dv) const {
    Scores s, g;
    Operands p, d;
    Remainders rest;
    const i32 first_row = place.tile * kBlockQueries;
    const ScoreRules<float> rules = HeadRules(args, facts.block.sequence, place.head).scores;
    wait_barrier(shared.queries_full(ring.stage), ring.phase);
    if (first_row < facts.clean.begin || facts.clean.end < first_row + kBlockQueries) clear_unseen(first_row, ring);
    take_turn();
    begin_scores<kKeyTile, kQueryTile>(s, own_rows(shared.keys()), shared.queries(ring.stage));
    wait_products<0>();
    pin(s);
    if constexpr (kNatural) make_logits(s, rules, Distances(facts.block, facts.block.first, first_row));
    correct_scores(s, args, facts, warpgroup * kPartRows, place);
    weigh_step(s, args.units.c, shared.facts(ring.stage));
    pack_operands(p, s);
    keep_remainders(rest, s);
    wait_barrier(shared.outputs_full(ring.stage), ring.phase);
    begin_scores<kValueTile, kOutputTile>(g, own_rows(shared.values()), shared.outputs(ring.stage));
    begin_sums<kOutputTile>(dv, p, shared.outputs(ring.stage));
    pass_turn();
    wait_products<1>();
    pin(g);
    const KeptWeights weights{p, rest};
    differentiate_step(g, weights, shared.facts(ring.stage) + kFactBytes / 2);
    const Distances away(facts.block, facts.block.first, first_row);  // anew: 32 differences would be kept from above
    const float slope = kAlibi ? slope_of(g, away) : 0.f;
    if constexpr (kSoftcap) pass_softcap(g, weights, shared.facts(ring.stage), rules, away);
    pack_operands(d, g);
    store_gradients(d, number);
    begin_sums<kQueryTile>(dk, d, shared.queries(ring.stage));
    wait_products<0>();
    return slope;
  }

  // The lanes' parts of a head's dslope are one number of scratch.
  void store_slope(i32 head, float slope) const {
    slope = warp_sum(slope);
    const int number = kWarps / kKeyWarpgroups * warpgroup + warp;
    meet(kAllOfKeys, kWarps * kWarp);
    if (lane == 0) facts.slopes[number] = slope;
    meet(kAllOfKeys, kWarps * kWarp);
    if (number != 0 || lane != 0) return;
    float sum = 0.f;
    for (float one : facts.slopes) sum += one;
    const i64 blocks = is_varlen(args.cu_seqlens_k) ? args.key_blocks : i64{args.batch} * args.key_blocks;
    args.slope_sums[head * blocks + facts.block.number] = sum;
  }

  void run() const {
    const i32 steps = step_count(args, facts.block);
    KeySums dk;
    ValueSums dv;
#pragma unroll
    for (auto& tile : dk[0])
#pragma unroll
      for (float& x : tile) x = 0.f;
#pragma unroll
    for (auto& tile : dv[0])
#pragma unroll
      for (float& x : tile) x = 0.f;
    if (steps > 0) {
      wait_barrier(shared.keys_full(), 0);
      wait_barrier(shared.values_full(), 0);
      if (facts.clean_keys < kBlockKeys) {
        const i32 end = kPartRows * (warpgroup + 1), begin = clamp_to(facts.clean_keys, end - kPartRows, end);
        clear_rows<kKeyTile>(shared.keys(), begin, end);
        clear_rows<kValueTile>(shared.values(), begin, end);
        publish(warpgroup);
      }
      Place place = first_place(args, facts.block);
      Ring ring;
      float slope = 0.f;
      if (warpgroup == kKeyWarpgroups - 1) pass_turn();  // warpgroup 0 has the first one
#pragma unroll 1
      for (i32 number = 0; number < steps; ++number) {
        slope += step(number, place, ring, dk, dv);
        const i32 head = place.head;
        place.next(facts.block);
        ring.next();
        if (kAlibi && args.slope_sums != nullptr && place.head != head) {
          store_slope(head, slope);
          slope = 0.f;
        }
      }
      pin(dk);
      pin(dv);
    } else if (kAlibi && facts.block.broken && args.slope_sums != nullptr) {
      for (i32 head = 0; head < args.group; ++head)
        store_slope(facts.block.kv_head * args.group + head, as_float(0x7fffffffu));
    }
    const int first = kPartRows * warpgroup + kWarpRows * warp;
    const ResultRows rows{facts.block, first, first, lane};
    rows.store<kValueTile>(dv, shared.values(), {args.dv, 0, args.value_dim, 1 / kWeightUnit});
    if (steps > 0) wait_barrier(shared.gradients_empty(half_of(steps - 1)), half_phase(steps - 1));  // dQ has read K
    rows.store<kKeyTile>(dk, shared.keys(), {args.dk, 0, args.head_dim, args.rules.scale});
  }
};

// Deterministic: thread blocks take key blocks in the order in which they begin, which need not be that of their indices.
inline u32 claim_block(const BackwardArgs& args, Facts& facts) {
  if constexpr (!kDeterministic) return blockIdx.x;
  if (threadIdx.x == 0) facts.index = atomicAdd(args.begun, 1u);
  __syncthreads();
  return facts.index;
}

}  // namespace narrows

extern "C" __global__ void __launch_bounds__(narrows::kThreads, 1)
    backward_sm90(const __grid_constant__ narrows::BackwardSm90Args args) {
  using namespace narrows;
  extern __shared__ __align__(kTileAlignment) char memory[];
  const Shared shared{shared_address(memory)};
  Facts& facts = *reinterpret_cast<Facts*>(memory + kFactsAt);
  const int warp = static_cast<int>(__shfl_sync(~0u, threadIdx.x / u32{kWarp}, 0));  // uniform, also for the compiler
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  let_next_begin();
  if (threadIdx.x == kLoader)
    for (const TensorMap* map : {&args.k_map, &args.v_map, &args.q_map, &args.dout_map}) prefetch_map(*map);
  const KeyBlock block = find_key_block(args, claim_block(args, facts), kLastKeysFirst);
  if (block.rows == 0) return wait_for_previous();  // so that this kernel ends after the one ahead
  if (threadIdx.x == kLoader) {
    if (shared.base % kTileAlignment != 0) __trap();
    init_barriers(shared);
  }
  if (threadIdx.x == 0) find_facts(args, block, facts);
  __syncthreads();
  if (warp < kWarps) {
    grow_registers<kKeyRegisters>();
    find_rows(args, block, 0, facts);
    meet(kAllOfKeys, kWarps * kWarp);
    KeyComputer{args, facts, shared, warp / 4, warp % 4, lane}.run();
  } else if (warp < kWarps + 4) {
    shrink_registers<kSumRegisters>();
    bring_and_sum(args, facts, shared, warp - kWarps);
  } else if constexpr (kDeterministic) {
    shrink_registers<kTurnRegisters>();
    const Turns turns{args, facts.block, shared};
    if (threadIdx.x == kThreads - kWarpgroup) turns.take();
    if (threadIdx.x == kThreads - kWarp) turns.pass();
  }
}
