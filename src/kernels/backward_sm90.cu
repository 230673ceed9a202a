// dK, dV and the parts of dQ on Hopper, by recomputation: wgmma on tiles that the copy engine brings.
//
// A thread block keeps 128 keys of one kv head on chip and walks over the blocks of query rows that see any of them, for each query
// head of the group, as backward_sm80.cu does. Two warpgroups own 64 keys each: S^T = K Q^T, P^T from it and the rows' LSE,
// dP^T = V dO^T, dS^T = P^T (dP^T - delta), dV += P^T dO and dK += dS^T Q, with P^T and dS^T from registers. They never wait for
// each other. A third multiplies dQ = dS K out of the dS^T that both leave in shared memory, and adds it to the sums in scratch, to
// which other thread blocks add as well; one of its threads brings all tiles.
#include "kernels/backward_pipeline_sm90.cuh"
#include "kernels/copy_tile.cuh"

namespace narrows {

// ------------------------------------------------------------------------------------------------------------------ bring

// A tile, in boxes of 64 columns.
template <SmemTile tile> inline void load_tile(u32 to, const TensorMap& map, u32 barrier, BoxPlace from, u64 hint) {
  for (int chunk = 0; chunk < tile.row_bytes / kChunkBytes; ++chunk, from.column += kChunkColumns)
    load_box(to + static_cast<u32>(chunk * tile.rows * kChunkBytes), map, barrier, from, hint);
}

// One thread: K and V once, then Q, dO and the rows' facts, kStages steps ahead.
struct Loader {
  const BackwardSm90Args& args;
  const Facts& facts;
  Shared shared;
  Place place;
  i32 left;  // steps
  Ring ring;

  Loader(const BackwardSm90Args& args_, const Facts& facts_, const Shared& shared_)
      : args(args_),
        facts(facts_),
        shared(shared_),
        place(first_place(args_, facts_.block)),
        left(step_count(args_, facts_.block)) {}

  void load_keys() const {
    const KeyBlock& block = facts.block;
    const BoxPlace from{0, block.first_key + block.first, block.kv_head,
                        is_varlen(args.cu_seqlens_k) ? 0 : block.sequence};
    arrive_expecting(shared.keys_full(), static_cast<u32>(kKeyTile.bytes()));
    load_tile<kKeyTile>(shared.keys(), args.k_map, shared.keys_full(), from, kEvictFirst);
    arrive_expecting(shared.values_full(), static_cast<u32>(kValueTile.bytes()));
    load_tile<kValueTile>(shared.values(), args.v_map, shared.values_full(), from, kEvictFirst);
  }

  // Of the next step, to a stage that is free.
  void load_step() {
    if (left-- <= 0) return;
    const KeyBlock& block = facts.block;
    const BoxPlace from{0, block.first_query + place.tile * kBlockQueries, place.head,
                        is_varlen(args.cu_seqlens_q) ? 0 : block.sequence};
    const u32 queries = shared.queries_full(ring.stage), outputs = shared.outputs_full(ring.stage);
    arrive_expecting(queries, static_cast<u32>(kQueryTile.bytes()) + kFactBytes);
    load_tile<kQueryTile>(shared.queries(ring.stage), args.q_map, queries, from, kEvictLast);
    load_bytes(shared.facts(ring.stage),
               args.rows + query_block_number(args, block, place.head, place.tile) * kBlockQueries, kFactBytes,
               queries);
    arrive_expecting(outputs, static_cast<u32>(kOutputTile.bytes()));
    load_tile<kOutputTile>(shared.outputs(ring.stage), args.dout_map, outputs, from, kEvictLast);
    place.next(block);
    ring.next();
  }
};

// Zeros in rows [begin, end) of a tile, by the threads of a warpgroup.
template <SmemTile tile> inline void clear_rows(u32 to, i32 begin, i32 end) {
  constexpr int units = tile.row_bytes / kUnitBytes;
  for (i32 index = begin * units + static_cast<i32>(thread_index()) % kWarpgroup; index < end * units;
       index += kWarpgroup)
    store_shared128(to + tile.offset(index / units, index % units), {0, 0, 0, 0});
}

// What shows the engine and the tensor cores, to all of a warpgroup, what its threads wrote. Named barriers: 1 + its number.
inline void publish(int warpgroup) {
  fence_async_shared();
  meet(1 + warpgroup, kWarpgroup);
}

// --------------------------------------------------------------------------------------------------------------------- dQ

// Deterministic: key blocks add to some query blocks, a group, in their order; each warp after the same warp of the key block
// before, as in backward_sm80.cu.
constexpr i32 kGroup = max_of(256 / kBlockQueries, 1);  // query blocks

struct Turn {
  u32* at = nullptr;
  u32 number = 0;
};

struct Summer {
  const BackwardSm90Args& args;
  const Facts& facts;
  Shared shared;
  int warp;  // within the warpgroup
  Place place;
  Turn now, before;

  bool begins_group() const { return place.tile % kGroup == 0 || place.tile == facts.block.begin_tile; }
  bool ends_group() const { return place.tile % kGroup == kGroup - 1 || place.tile == facts.block.end_tile - 1; }

  // It adds only once it has seen its number: a branch is enough of an order, as what others added before was made by the memory
  // before their number was stored.
  void await_turn() {
    const KeyBlock& block = facts.block;
    const i32 first = place.tile / kGroup * kGroup;
    now.number = static_cast<u32>(block.first / kBlockKeys - first_key_block(args, block, first, kGroup));
    now.at = args.turns + query_block_number(args, block, place.head, first) * 4 + warp;
    while (load_relaxed(now.at) != now.number) {
    }
    __syncwarp();
  }
  // A step later, when what the warp has added is there: at once it would wait for that.
  void pass_turn() {
    if (before.at == nullptr) return;
    __syncwarp();
    if (threadIdx.x % kWarp == 0) store_release(before.at, before.number + 1);
    before = {};
  }

  // 64 query rows and 64 columns of dS K.
  using Part = float[1][kChunkColumns / 8][4];
  void begin_part(Part& part, int half, int row_part, int chunk) const {
    const u64 a = descriptor_along_rows(shared.gradients(half) + static_cast<u32>(row_part * kBlockKeys * kChunkBytes));
    const u64 b = descriptor_down_columns(shared.keys() + static_cast<u32>(chunk * kBlockKeys * kChunkBytes), kKeyTile);
    fence_products();
#pragma unroll
    for (int i = 0; i < kBlockKeys / 16; ++i)
      multiply_gradients(part, a + step_down_columns(i), b + step_down_columns(i), i > 0);
    commit_products();
  }

  // A burst would hold up what the other warps have in shared memory: one sum of four goes each kPace clocks.
  void send(const Part& part, float* to) const {
    const u32 start = clock();
#pragma unroll
    for (int j = 0; j < kChunkColumns / 8; ++j) {
      while (clock() - start < static_cast<u32>(j * kPace)) {
      }
      add_global4(to + j * 4 * kWarp, part[0][j]);
    }
  }

  void step(i32 number) {
    constexpr int row_parts = kBlockQueries / kPartRows, chunks = kHeadDim / kChunkColumns;
    const int half = half_of(number);
    float* const sums = args.query_sums + query_block_number(args, facts.block, place.head, place.tile) * kSumsOfBlock +
                        static_cast<i32>(threadIdx.x) % kWarp * 4;
#pragma unroll
    for (int index = 0; index < row_parts * chunks; ++index) {
      const int row_part = index / chunks, chunk = index % chunks;
      Part part;
      begin_part(part, half, row_part, chunk);
      if (kDeterministic && index == 0) pass_turn();
      wait_products<0>();
      if (index == row_parts * chunks - 1 && threadIdx.x % kWarp == 0) arrive(shared.gradients_empty(half));
      pin(part);
      if (args.query_sums == nullptr) continue;
      if (kDeterministic && index == 0 && begins_group()) await_turn();
      send(part, sums + sum_place(row_part * (kPartRows / 16) + warp, chunk * (kChunkColumns / 8), 0, 0));
    }
    if (kDeterministic && args.query_sums != nullptr && ends_group()) before = now;
    place.next(facts.block);
  }
};

inline void bring_and_sum(const BackwardSm90Args& args, const Facts& facts, const Shared& shared, int warp) {
  const i32 steps = step_count(args, facts.block);
  if (steps == 0) return;
  const bool loads = threadIdx.x % kWarpgroup == 0;
  Loader loader(args, facts, shared);
  if (loads) {
    loader.load_keys();
    for (int stage = 0; stage < kStages; ++stage) loader.load_step();
  }
  __syncwarp();
  Summer summer{args, facts, shared, warp, first_place(args, facts.block), {}, {}};
  wait_barrier(shared.keys_full(), 0);
  if (facts.clean_keys < kBlockKeys) {
    clear_rows<kKeyTile>(shared.keys(), facts.clean_keys, kBlockKeys);
    publish(kKeyWarpgroups);
  }
#pragma unroll 1
  for (i32 step = 0; step < steps; ++step) {
    wait_barrier(shared.gradients_full(half_of(step)), half_phase(step));
    if (step > 0 && loads) loader.load_step();
    __syncwarp();
    summer.step(step);
  }
  if constexpr (kDeterministic) summer.pass_turn();
}

// ---------------------------------------------------------------------------------------------------------------- dK, dV

// P^T or dS^T of a step as the first operand of dV or dK.
using Operands = u32[kBlockQueries / 16][4];

inline void pack_operands(Operands& a, const Scores& s) {
#pragma unroll
  for (int i = 0; i < kBlockQueries / 16; ++i)
#pragma unroll
    for (int n = 0; n < 4; ++n) a[i][n] = pack(s[0][2 * i + n / 2][n % 2 * 2], s[0][2 * i + n / 2][n % 2 * 2 + 1]);
}

// Two neighbouring queries of each of two tiles of 8, j and j + 1: references, or behind these deltas.
struct FourFacts {
  u32 words[4];

  FourFacts(u32 facts, int j) {
    load_shared128(facts + static_cast<u32>(32 * j) + threadIdx.x % 4 * 16, words[0], words[1], words[2], words[3]);
  }
  float operator()(int tile, int e) const { return as_float(words[tile % 2 * 2 + e]); }
};

// Scores become P^T.
inline void weigh_step(Scores& s, float c, u32 references) {
#pragma unroll
  for (int j = 0; j < kQueryTiles; j += 2) {
    const FourFacts reference(references, j);
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      float& x = s[0][j + m / 4][m % 4];
      x = exp2_approx(min_or_nan(__fmaf_rn(x, c, -reference(m / 4, m % 2)), 0.f));
    }
  }
}

// What rounding to 16 bits takes from P^T, of which dS^T is to be made: registers are too few for both. A byte of each weight, the
// one behind the 16 bits, a tile of 8 queries a word.
using Remainders = u32[kQueryTiles];
static_assert(kElement == Element::bf16, "the upper half of an fp32 number");

inline void keep_remainders(Remainders& rest, const Scores& p) {
#pragma unroll
  for (int j = 0; j < kQueryTiles; ++j) {
    const u32 low = pick_bytes(as_bits(p[0][j][0]), as_bits(p[0][j][1]), 0x0051);
    const u32 high = pick_bytes(as_bits(p[0][j][2]), as_bits(p[0][j][3]), 0x5100);
    rest[j] = pick_bytes(low, high, 0x7610) ^ 0x80808080u;
  }
}

// A weight to 2^-16 of itself. pair: it and its neighbour, rounded to nearest: up where the byte behind was 0x80 or more, which
// the exclusive or above made less. Of one weight in 2^17, a tie that went down, 2^-8 of it is lost.
inline float weight_of(u32 pair, u32 rest, int i) {
  const u32 byte = static_cast<u32>(4 + i) * 0x11;
  return as_float(pick_bytes(pair, rest, (i % 2 == 0 ? 0x1000u : 0x3200u) + byte) - 0x8000u);
}

// dS^T = P^T (dP^T - delta), as an operand.
inline void differentiate_step(Operands& d, const Scores& g, const Operands& p, const Remainders& rest, u32 deltas) {
#pragma unroll
  for (int j = 0; j < kQueryTiles; j += 2) {
    const FourFacts delta(deltas, j);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int tile = j + n / 2, first = n % 2 * 2;
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        x[e] = weight_of(p[j / 2][n], rest[tile], first + e) * (g[0][tile][first + e] - delta(tile, e));
      d[j / 2][n] = pack(x[0], x[1]);
    }
  }
}

struct KeyComputer {
  const BackwardSm90Args& args;
  const Facts& facts;
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
      const Rows rows = rows_that_see(args, facts.block, facts.block.first + place.key(r));
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
    const u32 at = shared.facts(stage) + static_cast<u32>(fact_place(row)) * sizeof(float);
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
    const Rows& whole = facts.whole[warpgroup];
    if (whole.begin <= first_row && first_row + kBlockQueries <= whole.end && !facts.far) return;
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

  void step(i32 number, const Place& place, const Ring& ring, KeySums& dk, ValueSums& dv) const {
    Scores s, g;
    Operands p, d;
    Remainders rest;
    const i32 first_row = place.tile * kBlockQueries;
    wait_barrier(shared.queries_full(ring.stage), ring.phase);
    if (first_row < facts.clean.begin || facts.clean.end < first_row + kBlockQueries) clear_unseen(first_row, ring);
    begin_scores<kKeyTile, kQueryTile>(s, shared.keys(), shared.queries(ring.stage));
    wait_products<0>();
    pin(s);
    correct_scores(s, place);
    weigh_step(s, args.units.c, shared.facts(ring.stage));
    pack_operands(p, s);
    keep_remainders(rest, s);
    wait_barrier(shared.outputs_full(ring.stage), ring.phase);
    begin_scores<kValueTile, kOutputTile>(g, shared.values(), shared.outputs(ring.stage));
    begin_sums<kOutputTile>(dv, p, shared.outputs(ring.stage));
    wait_products<1>();
    pin(g);
    differentiate_step(d, g, p, rest, shared.facts(ring.stage) + kFactBytes / 2);
    store_gradients(d, number);
    begin_sums<kQueryTile>(dk, d, shared.queries(ring.stage));
    wait_products<0>();
  }

  // Sums of the lane to the rows of a tile that this warp alone still uses, and from there to memory.
  template <SmemTile tile, int n>
  void store_results(const float (&sums)[1][n][4], u32 to, const TensorArg& tensor, i32 columns, float factor) const {
    const KeyBlock& block = facts.block;
    const int first = kPartRows * warpgroup + 16 * warp;
    const float nan = as_float(0x7fffffffu);
#pragma unroll
    for (int j = 0; j < n; j += 2) {
      const auto pair = [&](int m) {
        const bool exists = block.first + first + m % 2 * 8 + lane / 4 < block.keys;
        float x[2];
#pragma unroll
        for (int e = 0; e < 2; ++e)
          x[e] = block.broken ? nan : exists ? sums[0][j + m / 2][m % 2 * 2 + e] * factor : 0.f;
        return pack(x[0], x[1]);
      };
      store_matrices(to + tile.offset(first + lane % 16, j + lane / 16), pair(0), pair(1), pair(2), pair(3));
    }
    __syncwarp();
    if (tensor.data)
      store_any_rows<tile>(
          to, first, min_of(block.rows - first, 16),
          rows_of(tensor, block.sequence, block.first_key + block.first + first, block.kv_head, columns));
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
#pragma unroll 1
      for (i32 number = 0; number < steps; ++number) {
        step(number, place, ring, dk, dv);
        place.next(facts.block);
        ring.next();
      }
      pin(dk);
      pin(dv);
    }
    store_results<kValueTile>(dv, shared.values(), args.dv, args.value_dim, 1.f);
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
  const KeyBlock block = find_key_block(args, claim_block(args, facts));
  if (block.rows == 0) return;
  if (threadIdx.x == 0) {
    if (shared.base % kTileAlignment != 0) __trap();
    init_barriers(shared);
    find_facts(args, block, facts);
  }
  __syncthreads();
  if (warp < kWarps) {
    grow_registers<kKeyRegisters>();
    KeyComputer{args, facts, shared, warp / 4, warp % 4, lane}.run();
  } else {
    shrink_registers<kSumRegisters>();
    bring_and_sum(args, facts, shared, warp - kWarps);
  }
}
