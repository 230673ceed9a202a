// A step of the backward kernels: some keys and some query rows, on chip, and from them P^T and dS^T.
#pragma once
#include "kernels/backward_scores.cuh"
#include "kernels/copy_tile.cuh"

namespace narrows {

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
  bool far;  // some row of the call has an LSE far out
};

struct Call {
  const BackwardArgs& args;
  Facts& facts;
  u32 tiles;  // their shared address

  u32 keys() const { return tiles; }
  u32 values() const { return tiles + kKeyTile.bytes(); }
  u32 queries(i32 step) const {
    return values() + static_cast<u32>(kValueTile.bytes() + step % kStages * kQueryTile.bytes());
  }
  u32 outputs(i32 step) const {
    return queries(0) + static_cast<u32>(kStages * kQueryTile.bytes() + step % kStages * kOutputTile.bytes());
  }
  u32 gradients(i32 step) const {
    return outputs(0) +
           static_cast<u32>(kStages * kOutputTile.bytes() + (kExchanges ? 0 : step % 2 * kScoreTile.bytes()));
  }
  u32 weights() const { return gradients(0) + kScoreTile.bytes(); }
  u32 rows(i32 step) const {
    return weights() + kScoreTile.bytes() + static_cast<u32>(step % kStages * kBlockQueries) * sizeof(RowFacts);
  }
  static_assert(sizeof(Keys) == sizeof(RowFacts));
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

// Rows of a step. Those that see no key of the block may hold anything: they are not read.
template <SmemTile tile>
inline void load_rows(const Call& call, u32 to, const TensorArg& from, const Place& place, i32 columns) {
  const KeyBlock& block = call.facts.block;
  const i32 first_row = place.tile * kBlockQueries;
  copy_tile<tile>(to, rows_of(from, block.sequence, block.first_query + first_row, place.head, columns), 0,
                  block.seeing.begin - first_row, block.seeing.end - first_row);
}

inline void load_outputs(const Call& call, i32 step, const Place& place) {
  load_rows<kOutputTile>(call, call.outputs(step), call.args.dout, place, call.args.value_dim);
  commit_copies();
}

// Q, and what goes with its rows.
inline void load_queries(const Call& call, i32 step, const Place& place) {
  const BackwardArgs& args = call.args;
  load_rows<kQueryTile>(call, call.queries(step), args.q, place, args.head_dim);
  const RowFacts* const facts =
      args.rows + query_block_number(args, call.facts.block, place.head, place.tile) * kBlockQueries;
  const i32 row = static_cast<i32>(threadIdx.x), number = place.tile * kBlockQueries + row;
  if (row < kBlockQueries)
    copy_async<8>(call.rows(step) + static_cast<u32>(row) * sizeof(RowFacts), facts + row,
                  call.facts.block.seeing.begin <= number && number < call.facts.block.seeing.end);
  commit_copies();
  look(call, step, place.tile * kBlockQueries);
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

// P^T of a step, ready to multiply dO, and the gradient of its logits, transposed. special: some logits are not what the products
// and rules give. tangents: of a softcap, which comes next on the way back.
inline void make_gradients(const Call& call, i32 step, const Place& place, bool special, const DropoutRule& dropout,
                           Scores& p, Scores& g, Tangents& tangents) {
  const BackwardArgs& args = call.args;
  const KeyBlock& block = call.facts.block;
  const LanePlace lane;
  const i32 first_row = place.tile * kBlockQueries;
  multiply_rows<kKeyTile, kQueryTile>(p, call.keys(), lane.first_key(), call.queries(step), lane.first_query());
  if constexpr (kNatural) {
    const HeadRules rules(args, block.sequence, place.head);
    make_logits(p, tangents, args, block, rules.scores, place.head, first_row);
  }
  if (special) {
    hide_unseen(p, call.seen(step), block.first);
    if (!kNatural && call.facts.far) bring_near(p, args, block, place.head, first_row);
  }
  if constexpr (kMask) hide_masked(p, args, block, place.head, first_row);
  multiply_rows<kValueTile, kOutputTile>(g, call.values(), lane.first_key(), call.outputs(step), lane.first_query());
  weigh(p, args, call.rows(step));
  if constexpr (kDropout) {
    const Kept kept(dropout, block.sequence, place.head, first_row, block.first);
    drop(g, kept, keep_factor<float>(args.dropout));
    differentiate(g, p, call.rows(step));
    drop(p, kept, 1.f);
  } else {
    differentiate(g, p, call.rows(step));
  }
}

}  // namespace narrows
