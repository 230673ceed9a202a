// The warpgroups of the sm90 backward kernel of wide heads that sum: two dK and dV, one dQ.
#pragma once
#include "kernels/backward_results_sm90.cuh"
#include "kernels/backward_turns_sm90.cuh"
#include "kernels/backward_weights_sm90.cuh"
#include "kernels/backward_wide_bring_sm90.cuh"

namespace narrows {

// ---------------------------------------------------------------------------------------------------------------- dK and dV

template <int n> inline void clear_sums(float (&sums)[1][n][4]) {
#pragma unroll
  for (auto& tile : sums[0])
#pragma unroll
    for (float& x : tile) x = 0.f;
}

// Of the thread block's keys, `head_chunks` and `value_chunks` chunks of columns.
template <int head_chunks, int value_chunks> struct KeySummer {
  using KeySums = float[1][head_chunks * kChunkColumns / 8][4];
  using ValueSums = float[1][value_chunks * kChunkColumns / 8][4];
  static constexpr SmemTile keys_part{kOwnKeys, head_chunks*kChunkBytes},
      values_part{kOwnKeys, value_chunks*kChunkBytes};

  const Role& role;
  int half;  // which of the two warpgroups
  bool loads;

  u32 of_keys(u32 tile) const { return tile + static_cast<u32>(first_chunk(kHeadChunks, half)) * kChunkOfTile; }
  u32 of_values(u32 tile) const { return tile + static_cast<u32>(first_chunk(kValueChunks, half)) * kChunkOfTile; }

  // 64 keys by columns of Q or dO, over the queries.
  template <SmemTile step, int n> static void begin_sums(float (&sums)[1][n][4], u32 operands, u32 columns) {
    const u64 a = descriptor_along_rows(operands), b = descriptor_down_columns(columns, step);
    pin(sums);
    fence_products();
#pragma unroll
    for (int i = 0; i < kBlockQueries / 16; ++i)
      multiply_sums(sums, a + step_along_rows(kOwnScoreTile, i), b + step_down_columns(i), 1);
    commit_products();
  }

  // The Q of the step behind, once dK of the step before is done everywhere.
  void load_queries(Place place, Ring ring, bool last) const {
    if (!loads || last) return;
    place.next(role.facts.block);
    ring.next();
    Loader(role).load_queries(place, ring);
    Loader(role).load_facts(place, ring);
  }
  // The next dO of the same stage.
  void load_outputs(Place place, OutputRing ring, i32 left) const {
    if (!loads || left <= kOutputStages) return;
    for (int i = 0; i < kOutputStages; ++i) {
      place.next(role.facts.block);
      ring.next();
    }
    Loader(role).load_outputs(place, ring);
  }

  // left: steps, this one among them.
  void step(i32 number, i32 left, const Place& place, const Ring& q, const OutputRing& o, KeySums& dk,
            ValueSums& dv) const {
    const Shared& shared = role.shared;
    const int now = half_of(number);
    wait_products<0>();
    if (number > 0) release_step(number - 1, q.stage ^ 1);
    load_queries(place, q, left == 1);
    __syncwarp();
    wait_barrier(shared.outputs_full(o.stage), o.phase);
    wait_barrier(shared.weights_full(now), half_phase(number));
    begin_sums<kOutputTile>(dv, shared.weights(now), of_values(shared.outputs(o.stage)));
    wait_products<0>();
    role.release<&Shared::outputs_empty>(o.stage);
    if (role.lane == 0) arrive(shared.weights_empty(now));
    load_outputs(place, o, left);
    __syncwarp();
    wait_barrier(shared.gradients_full(now), half_phase(number));
    wait_barrier(shared.queries_full(q.stage), q.phase);
    begin_sums<kQueryTile>(dk, shared.gradients(now), of_keys(shared.queries(q.stage)));
  }
  // dK of the step is done, before P of the next is there: S of the one behind that must find its Q.
  void release_step(i32 number, int stage) const {
    role.release<&Shared::queries_empty>(stage);
    if (role.lane == 0) arrive(role.shared.gradients_empty(half_of(number)));
  }

  void sum(i32 steps, KeySums& dk, ValueSums& dv) const {
    Place place = first_place(role.args, role.facts.block);
    Ring q;
    OutputRing o;
#pragma unroll 1
    for (i32 number = 0; number < steps; ++number) {
      step(number, steps - number, place, q, o, dk, dv);
      place.next(role.facts.block);
      q.next();
      o.next();
    }
    wait_products<0>();
    pin(dk);
    pin(dv);
    if (role.lane == 0) arrive(role.shared.gradients_empty(half_of(steps - 1)));
  }
  // In the order in which they are needed: S takes K and Q, P the facts, dP V and dO.
  void load_first(Place place, i32 steps) const {
    const Loader loader(role);
    loader.load_keys();
    loader.load_queries(place, {});
    wait_for_previous();  // which makes the rows' facts
    loader.load_facts(place, {});
    loader.load_values();
    OutputRing o;
    for (int i = 0; i < min_of(kOutputStages, steps); ++i) {
      loader.load_outputs(place, o);
      place.next(role.facts.block);
      o.next();
    }
  }

  void run() const {
    const BackwardSm90Args& args = role.args;
    const Shared& shared = role.shared;
    const i32 steps = step_count(args, role.facts.block);
    KeySums dk;
    ValueSums dv;
    clear_sums(dk);
    clear_sums(dv);
    if (loads && steps > 0) load_first(first_place(args, role.facts.block), steps);
    __syncwarp();
    wait_for_previous();  // also where there is no step
    if (steps > 0) sum(steps, dk, dv);
    leave_cluster();  // nothing more goes to the other; what is stored behind this is not waited for
    const int row = kWarpRows * role.warp;
    const ResultRows rows{role.facts.block, role.first_own() + row, row, role.lane};
    const auto columns = [](i32 all, int first, int chunks) {
      return clamp_to(all - first * kChunkColumns, 0, chunks * kChunkColumns);
    };
    const int first_value = first_chunk(kValueChunks, half), first_head = first_chunk(kHeadChunks, half);
    rows.store<values_part>(
        dv, of_values(shared.values()),
        {args.dv, first_value * kChunkColumns, columns(args.value_dim, first_value, value_chunks), 1 / kWeightUnit});
    if (steps > 0) wait_barrier(shared.gradients_empty(half_of(steps - 1)), half_phase(steps - 1));  // dQ has read K
    rows.store<keys_part>(
        dk, of_keys(shared.keys()),
        {args.dk, first_head * kChunkColumns, columns(args.head_dim, first_head, head_chunks), args.rules.scale});
  }
};

inline void sum_keys(const Role& role, int half) {
  const bool loads = threadIdx.x == kLoader;
  constexpr int heads[] = {chunks_of(kHeadChunks, 0), chunks_of(kHeadChunks, 1)};
  constexpr int values[] = {chunks_of(kValueChunks, 0), chunks_of(kValueChunks, 1)};
  if constexpr (heads[0] == heads[1] && values[0] == values[1]) {
    KeySummer<heads[0], values[0]>{role, half, loads}.run();
  } else {
    if (half == 0)
      KeySummer<heads[0], values[0]>{role, half, loads}.run();
    else
      KeySummer<heads[1], values[1]>{role, half, loads}.run();
  }
}

// --------------------------------------------------------------------------------------------------------------------- dQ

// Each warp takes turns after the same warp of the key block before, as in backward_sm80.cu.
struct Turn {
  u32* at = nullptr;
  u32 number = 0, seen = 0;
};

struct Turns {
  const BackwardSm90Args& args;
  const KeyBlock& block;
  int warp;  // of those that sum, of both thread blocks
  Turn now, before;

  // Whose turn it is, asked before it must be known.
  void ask(const Place& place) {
    const i32 first = place.tile / kGroup * kGroup;
    now.number = turn_number(args, block, first, kGroup);
    now.at = args.turns + query_block_number(args, block, place.head, first) * kWarps + warp;
    now.seen = load_relaxed(now.at);
  }
  // It adds only once it has seen its number: a branch is enough of an order, as what others added before was made by the memory
  // before their number was stored.
  void await() {
    while (now.seen != now.number) now.seen = load_relaxed(now.at);
    __syncwarp();
  }
  // A step later, when what the warp has added is there: at once it would wait for that.
  void pass() {
    if (before.at == nullptr) return;
    __syncwarp();
    if (threadIdx.x % kWarp == 0) store_release(before.at, before.number + 1);
    before = {};
  }
};

// Of the keys of both thread blocks, `chunks` chunks of columns.
template <int chunks> struct QuerySummer {
  const Role& role;
  Place place;
  Turns turns;

  // 64 query rows and 64 columns of dS K.
  void begin_part(SumsOfChunk& part, int half, int chunk) const {
    const Shared& shared = role.shared;
    const u32 own = static_cast<u32>(first_chunk(kHeadChunks, role.rank) + chunk) * kChunkOfTile;
    const u32 others = static_cast<u32>(chunk) * kChunkOfTile;
    const u64 a = descriptor_along_rows(shared.gradients(half)),
              b = descriptor_down_columns(shared.keys() + own, kOwnKeyTile);
    const u64 other_a = descriptor_along_rows(shared.other_gradients(half));
    const u64 other_b = descriptor_down_columns(shared.other_keys() + others, kOwnKeyTile);
    fence_products();
#pragma unroll
    for (int i = 0; i < kOwnKeys / 16; ++i)
      multiply_gradients(part, a + step_down_columns(i), b + step_down_columns(i), i > 0);
#pragma unroll
    for (int i = 0; i < kOwnKeys / 16; ++i)
      multiply_gradients(part, other_a + step_down_columns(i), other_b + step_down_columns(i), 1);
    commit_products();
  }

  void step(i32 number, bool last) {
    const BackwardSm90Args& args = role.args;
    const int half = half_of(number), first_own = first_chunk(kHeadChunks, role.rank);
    const bool first = kDeterministic && is_first(args, role.facts.block, place);
    float* const sums = args.query_sums +
                        query_block_number(args, role.facts.block, place.head, place.tile) * kSumsOfBlock +
                        role.lane * 4;
#pragma unroll
    for (int chunk = 0; chunk < chunks; ++chunk) {
      SumsOfChunk part;
      begin_part(part, half, chunk);
      if (kDeterministic && chunk == 0) turns.pass();
      wait_products<0>();
      if (chunk == chunks - 1) role.release<&Shared::gradients_empty>(half);
      pin(part);
      if (args.query_sums == nullptr) continue;
      if (kDeterministic && chunk == 0 && begins_group(role.facts.block, place)) turns.await();
      send_sums(part, sums + sum_place(role.warp, (first_own + chunk) * (kChunkColumns / 8), 0, 0), first, last);
    }
    if (kDeterministic && args.query_sums != nullptr && ends_group(role.facts.block, place)) turns.before = turns.now;
    place.next(role.facts.block);
  }

  // Rows of K that do not exist.
  void clear_keys() const {
    const i32 clean = role.facts.clean_keys;
    const auto begin = [&](int rank) { return clamp_to(clean - rank * kOwnKeys, 0, kOwnKeys); };
    constexpr SmemTile others{kOwnKeys, chunks * kChunkBytes};
    clear_rows<kOwnKeyTile>(role.shared.keys(), begin(role.rank), kOwnKeys);
    clear_rows<others>(role.shared.other_keys(), begin(1 - role.rank), kOwnKeys);
    publish(kQuerySummer);
  }

  void run() {
    const BackwardSm90Args& args = role.args;
    const Shared& shared = role.shared;
    const i32 steps = step_count(args, role.facts.block);
    if (steps == 0) return;
    wait_for_previous();  // which clears the sums
    wait_barrier(shared.keys_full(), 0);
    if (role.facts.clean_keys < kBlockKeys) clear_keys();
#pragma unroll 1
    for (i32 number = 0; number < steps; ++number) {
      if (kDeterministic && args.query_sums != nullptr && begins_group(role.facts.block, place)) turns.ask(place);
      const int half = half_of(number);
      if (role.warp == 0 && role.lane == 0) arrive_expecting(shared.others_full(half), kScoreBytes);
      __syncwarp();
      wait_barrier(shared.gradients_full(half), half_phase(number));
      wait_barrier(shared.others_full(half), half_phase(number));
      step(number, number == steps - 1);
    }
    if constexpr (kDeterministic) turns.pass();
  }
};

inline void sum_queries(const Role& role) {
  const KeyBlock& block = role.facts.block;
  const Place first = first_place(role.args, block);
  const Turns turns{role.args, block, role.rank * kOwnWarps + role.warp, {}, {}};
  constexpr int more = chunks_of(kHeadChunks, 0), fewer = chunks_of(kHeadChunks, 1);
  if (more == fewer || role.rank == 0)
    QuerySummer<more>{role, first, turns}.run();
  else
    QuerySummer<fewer>{role, first, turns}.run();
}

}  // namespace narrows
