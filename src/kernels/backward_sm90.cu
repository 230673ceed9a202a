// dK, dV and the parts of dQ on Hopper, by recomputation: wgmma on tiles that the copy engine brings.
//
// A thread block keeps 128 keys of one kv head on chip and walks over the blocks of query rows that see any of them, for
// each query head of the group, as backward_sm80.cu does. Two warpgroups own 64 keys each: S^T = K Q^T, P^T from it and the
// rows' LSE, dP^T = V dO^T, dS^T = P^T (dP^T - delta), dV += P^T dO and dK += dS^T Q, with P^T and dS^T from registers. They
// never wait for each other. A third (backward_sums_sm90.cuh) multiplies dQ = dS K out of the dS^T that both leave in shared
// memory, and adds it to the sums in scratch, to which other thread blocks add as well; one of its threads brings all tiles.
#include "kernels/backward_sums_sm90.cuh"
#include "kernels/backward_weights_sm90.cuh"

namespace narrows {

constexpr i32 kWarpRows = 16;
constexpr u32 kNanPair = 0x7fff7fffu;

struct KeyComputer {
  const BackwardSm90Args& args;
  Facts& facts;
  Shared shared;
  int warpgroup, warp, lane;  // warp within its warpgroup

  u32 own_rows(u32 tile) const { return tile + static_cast<u32>(warpgroup * kPartRows * kChunkBytes); }

  // 64 keys by all queries of the step, over the columns.
  template <SmemTile own, SmemTile step> void begin_scores(Scores& s, u32 keys, u32 queries) const {
    const u64 a = descriptor_along_rows(own_rows(keys)), b = descriptor_along_rows(queries);
    fence_products();
#pragma unroll
    for (int i = 0; i < own.row_bytes / (16 * kElementBytes); ++i)
      multiply_scores(s, a + step_along_rows(own, i), b + step_along_rows(step, i), i > 0);
    commit_products();
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

  void hide_rows(Scores& s, i32 first_row) const {
    const LanePlace place;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Rows rows = facts.rows[place.key(r)];
      const u32 begin = static_cast<u32>(rows.begin - first_row - place.query(0, 0));
      const u32 count = static_cast<u32>(rows.end - rows.begin);
#pragma unroll
      for (int j = 0; j < kQueryTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (static_cast<u32>(8 * j + e) - begin >= count) s[0][j][r * 2 + e] = kHidden;
    }
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
    const i32 row = begin + static_cast<i32>(thread_index()) % kWarpgroup;
    if (row >= end) return;
    const u32 at = shared.facts(stage) + static_cast<u32>(4 * fact_place(row));
    store_shared(at, as_bits(kInfinity<float>));
    store_shared(at + kFactBytes / 2, 0);
  }

  // Scores of rows whose LSE is far out become differences to it: their reference is 0.
  void bring_near(Scores& s, const Place& place) const {
    const KeyBlock& block = facts.block;
    const i32 first_row = place.tile * kBlockQueries;
    const i64 row = block.first_query + first_row;
    const char* const lse = args.lse.data + block.sequence * args.lse.strides[0] + place.head * args.lse.strides[1] +
                            row * args.lse.strides[2];
    const float inverse = 1.f / args.units.scale;
    each_score(s, [&](int, int j, int e, float& x) {
      const i32 query = LanePlace().query(j, e);
      if (first_row + query >= block.queries) return;
      const float own = *reinterpret_cast<const float*>(lse + query * args.lse.strides[2]);
      if (is_far(own)) x = (__fmul_rn(x, args.units.scale) - own) * inverse;
    });
  }

  // Scores that the products alone do not give.
  void correct_scores(Scores& s, const Place& place) const {
    const i32 first_row = place.tile * kBlockQueries;
    const Rows &first = facts.rows[warpgroup * kPartRows], &last = facts.rows[(warpgroup + 1) * kPartRows - 1];
    const bool all = last.begin <= first_row && first_row + kBlockQueries <= min_of(first.end, last.end);
    if (all && !facts.far) return;
    asm volatile("" ::: "memory");  // a branch: without it each step has the instructions, predicated
    hide_rows(s, first_row);
    if (facts.far) bring_near(s, place);
  }

  // dS^T to shared memory, for dQ. Along a row the swizzle is an exclusive or of address bits.
  void store_gradients(const Operands& a, i32 number) const {
    const int half = half_of(number), row = kPartRows * warpgroup + 16 * warp + lane % 16;
    const u32 tile = shared.gradients(half), first = kScoreTile.offset(row, lane / 16);
    wait_barrier(shared.gradients_empty(half), half_phase(number) ^ 1);
#pragma unroll
    for (int i = 0; i < kBlockQueries / 16; ++i) {
      const u32 chunk = kScoreTile.offset(0, i / 4 * 8), within = static_cast<u32>(i % 4 * 2 * kUnitBytes);
      store_matrices(tile + chunk + (first ^ within), a[i][0], a[i][1], a[i][2], a[i][3]);
    }
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
    begin_scores<kKeyTile, kQueryTile>(s, shared.keys(), shared.queries(ring.stage));
    wait_products<0>();
    pin(s);
    if constexpr (kNatural) make_logits(s, rules, Distances(facts.block, first_row));
    correct_scores(s, place);
    weigh_step(s, args.units.c, shared.facts(ring.stage));
    pack_operands(p, s);
    keep_remainders(rest, s);
    wait_barrier(shared.outputs_full(ring.stage), ring.phase);
    begin_scores<kValueTile, kOutputTile>(g, shared.values(), shared.outputs(ring.stage));
    begin_sums<kOutputTile>(dv, p, shared.outputs(ring.stage));
    wait_products<1>();
    pin(g);
    differentiate_step(g, p, rest, shared.facts(ring.stage) + kFactBytes / 2);
    const Distances away(facts.block, first_row);  // anew: 32 differences would be kept from above
    const float slope = kAlibi ? slope_of(g, away) : 0.f;
    if constexpr (kSoftcap) pass_softcap(g, p, rest, shared.facts(ring.stage), rules, away);
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

  // Sums of the lane to the rows of a tile that this warp alone still uses, and from there to memory.
  template <SmemTile tile, int n>
  void store_results(const float (&sums)[1][n][4], u32 to, const TensorArg& tensor, i32 columns, float factor) const {
    const KeyBlock& block = facts.block;
    const int first = kPartRows * warpgroup + kWarpRows * warp;
#pragma unroll
    for (int j = 0; j < n; j += 2) {
      const auto pair = [&](int m) {
        const float* const two = &sums[0][j + m / 2][m % 2 * 2];
        return pack(two[0] * factor, two[1] * factor);
      };
      store_matrices(to + tile.offset(first + lane % 16, j + lane / 16), pair(0), pair(1), pair(2), pair(3));
    }
    __syncwarp();
    const i32 keys = block.broken ? 0 : clamp_to(block.keys - block.first - first, 0, kWarpRows);
    if (keys < kWarpRows) {  // what does not exist
      fill_rows<tile>(to, first + keys, first + kWarpRows, block.broken ? kNanPair : 0);
      __syncwarp();
    }
    if (tensor.data == nullptr) return;
    const i32 rows = min_of(block.rows - first, kWarpRows);
    const GlobalRows at =
        rows_of(tensor, block.sequence, block.first_key + block.first + first, block.kv_head, columns);
    if (rows == kWarpRows && columns * kElementBytes == tile.row_bytes && at.column_stride == kElementBytes &&
        (reinterpret_cast<u64>(at.first) | static_cast<u64>(at.row_stride)) % kUnitBytes == 0)
      store_whole_rows<tile>(to, first, at);
    else
      store_any_rows<tile>(to, first, rows, at);
  }

  // The same word everywhere.
  template <SmemTile tile> void fill_rows(u32 to, i32 begin, i32 end, u32 word) const {
    constexpr int units = tile.row_bytes / kUnitBytes;
    for (i32 index = begin * units + lane; index < end * units; index += kWarp)
      store_shared128(to + tile.offset(index / units, index % units), {word, word, word, word});
  }
  // A warp's rows, all of which are whole units: many loads at once.
  template <SmemTile tile> void store_whole_rows(u32 from, int first, const GlobalRows& to) const {
    constexpr int units = tile.row_bytes / kUnitBytes, at_once = kWarp / units, rounds = kWarpRows / at_once;
    const int row = lane / units, unit = lane % units;
    u32 words[rounds][4];
#pragma unroll
    for (int i = 0; i < rounds; ++i)
      load_shared128(from + tile.offset(first + row + i * at_once, unit), words[i][0], words[i][1], words[i][2],
                     words[i][3]);
    char* at = to.first + row * to.row_stride + unit * kUnitBytes;
#pragma unroll
    for (int i = 0; i < rounds; ++i, at += at_once * to.row_stride)
      *reinterpret_cast<uint4*>(at) = uint4{words[i][0], words[i][1], words[i][2], words[i][3]};
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
    store_results<kValueTile>(dv, shared.values(), args.dv, args.value_dim, 1 / kWeightUnit);
    if (steps > 0) wait_barrier(shared.gradients_empty(half_of(steps - 1)), half_phase(steps - 1));  // dQ has read K
    store_results<kKeyTile>(dk, shared.keys(), args.dk, args.head_dim, args.rules.scale);
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
    find_rows(args, block, facts);
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
