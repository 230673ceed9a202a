// O = softmax(scale * Q K^T) V and its LSE, on every GPU since Ampere: mma.sync on tiles that cp.async brings.
//
// A thread block keeps some query rows of one head on chip and walks over the tiles of keys that any of them sees; each warp
// has its own 16 or 32 rows and skips tiles that none of these sees. Tile n + 1 is on its way while tile n is computed: two
// stages, one barrier a tile. Shared memory: Q, then the stages, each K then V; at the end the output takes their place.
#include "kernels/copy_tile.cuh"
#include "kernels/score_rules.cuh"
#include "kernels/softmax.cuh"

namespace narrows {

constexpr int kStageBytes = kKeyTile.bytes() + kValueTile.bytes();
constexpr bool kShifted = kCopyBytes == 2;  // one stage, and raw rows in the place of the other
constexpr SmemTile kOutputTile{kBlockQueries, kValueBytes};

// In shared memory, because the loop over tiles needs every register.
struct Facts {
  QueryBlock block;
  i32 slice;                 // of the columns of V and O
  GlobalRows k, v;           // of the sequence and kv head, from key 0 on
  Keys rows[kBlockQueries];  // what each row sees
  Sight sights[kWarps];      // what each warp's rows see
  Keys hull;                 // of what all of them see
};

struct Call {
  const ForwardArgs& args;
  Facts& facts;
  u32 tiles;  // their shared address

  u32 stage(i32 tile) const {
    return tiles + static_cast<u32>(kQueryTile.bytes() + (kShifted ? 0 : tile % 2 * kStageBytes));
  }
  // Behind both stages.
  u32 bias() const {
    const int raw = kShifted ? RawRows<kKeyTile>::bytes + RawRows<kValueTile>::bytes : kStageBytes;
    return tiles + static_cast<u32>(kQueryTile.bytes() + kStageBytes + raw);
  }
  u32 mask() const { return bias() + static_cast<u32>(kBias ? kBiasTile.bytes() : 0); }
  u32 raw_keys() const { return tiles + static_cast<u32>(kQueryTile.bytes() + kStageBytes); }
  u32 raw_values() const { return raw_keys() + static_cast<u32>(RawRows<kKeyTile>::bytes); }
};

inline void load_queries(const Call& call, const QueryBlock& block) {
  const GlobalRows q =
      rows_of(call.args.q, block.sequence, block.first_query + block.first_row, block.head, call.args.head_dim);
  copy_tile<kQueryTile>(call.tiles, q, 0, 0, max_of(block.queries - block.first_row, 0));
  commit_copies();  // a block that sees no key waits for these alone
}

// Where more columns of V are than a warp can hold accumulators of, thread blocks share them: each computes the scores of its rows
// and a slice of O.
struct Slice {
  u32 block;  // of query rows and head, as find_query_block takes it
  i32 number;

  static Slice of(u32 index) {
    return {index / static_cast<u32>(kValueSlices), static_cast<i32>(index % static_cast<u32>(kValueSlices))};
  }
};

inline GlobalRows slice_of(const GlobalRows& rows, i32 slice) {
  const i32 first = slice * kValueDim;
  return {rows.first + first * rows.column_stride, rows.row_stride, rows.column_stride,
          clamp_to(rows.columns - first, 0, kValueDim)};
}

// Leaves the facts where every thread finds them.
inline void gather_facts(const Call& call, const QueryBlock& block, i32 slice) {
  const ForwardArgs& args = call.args;
  Facts& facts = call.facts;
  look(args, block, facts.rows, facts.sights);
  __syncthreads();
  if (threadIdx.x == 0) {
    const i32 kv_head = block.head / args.group;
    facts.block = block;
    facts.k = rows_of(args.k, block.sequence, block.first_key, kv_head, args.head_dim);
    facts.v = slice_of(rows_of(args.v, block.sequence, block.first_key, kv_head, args.value_dim), slice);
    facts.slice = slice;
    facts.hull = block_hull(facts.sights);
  }
  __syncthreads();
}

// Keys outside the hull are not read: no row of this block sees them, and perhaps no row at all.
inline void load_keys(const Call& call, i32 tile) {
  const i32 first = tile * kBlockKeys, begin = call.facts.hull.begin - first, end = call.facts.hull.end - first;
  const GlobalRows &k = call.facts.k, &v = call.facts.v;
  if constexpr (kShifted) {
    copy_raw<kKeyTile>(call.raw_keys(), k, static_cast<u32>(first), begin, end);
    copy_raw<kValueTile>(call.raw_values(), v, static_cast<u32>(first), begin, end);
  } else {
    copy_tile<kKeyTile>(call.stage(tile), k, static_cast<u32>(first), begin, end);
    copy_tile<kValueTile>(call.stage(tile) + kKeyTile.bytes(), v, static_cast<u32>(first), begin, end);
  }
  commit_copies();
}

// The warp's own rows of a tile, if there is one; its lanes have read the tile before.
inline void load_scores(const Call& call, i32 tile) {
  const i32 first = tile * kBlockKeys;
  if ((!kBias && !kMask) || first >= call.facts.hull.end) return;
  __syncwarp();
  if constexpr (kBias) load_bias(call.bias(), call.args, call.facts.block, first);
  if constexpr (kMask) load_mask(call.mask(), call.args, call.facts.block, first);
  commit_copies();
}

// From the raw rows to the tiles.
inline void shift_keys(const Call& call, i32 tile) {
  shift_rows<kKeyTile>(call.stage(tile), call.raw_keys(), call.facts.k);
  shift_rows<kValueTile>(call.stage(tile) + kKeyTile.bytes(), call.raw_values(), call.facts.v);
  __syncthreads();  // the tiles are whole, and the raw rows free
}

// Whether a maximum of the warp has moved. Asking pays where the accumulators are many.
inline bool rescales(const float (&factor)[kRows]) {
  bool moved = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) moved |= factor[r] != 1.f;
  return __any_sync(~0u, moved);
}

// A warp's rows against one tile.
inline void step(const Call& call, i32 tile, const HeadRules& rules, const DropoutRule& dropout, Softmax& softmax,
                 Outputs& o) {
  const QueryBlock& block = call.facts.block;
  const Keys& common = call.facts.sights[threadIdx.x / kWarp].common;
  const i32 first = tile * kBlockKeys;
  Scores s;
  multiply_rows<kQueryTile, kKeyTile>(s, call.tiles, LanePlace().first_row, call.stage(tile));
  if constexpr (kNatural) make_logits(s, block, rules, call.bias(), first);
  if (first < common.begin || common.end < first + kBlockKeys) hide_unseen(s, call.facts.rows, first);
  if constexpr (kMask) hide_masked(s, call.mask());
  load_scores(call, tile + 1);
  float factor[kRows], subtrahend[kRows];
  raise_reference(softmax, s, factor, subtrahend, call.args.units);
  if (!kSkipsRescale || rescales(factor)) scale_rows(o, factor);
  weigh(softmax, s, subtrahend, call.args.units);
  if constexpr (kDropout) drop(s, dropout, block, first);
  add_product<kValueTile>(o, s, call.stage(tile) + kKeyTile.bytes());
}

inline void attend(const Call& call, Softmax& softmax, Outputs& o) {
  const Facts& facts = call.facts;
  const HeadRules rules(call.args, facts.block.sequence, facts.block.head);
  const DropoutRule dropout = kDropout ? dropout_rule(call.args) : DropoutRule{};
  const Keys& seen = facts.sights[threadIdx.x / kWarp].hull;
  i32 tile = facts.hull.begin / kBlockKeys;
  load_keys(call, tile);
  load_scores(call, tile);
  for (; tile * kBlockKeys < facts.hull.end; ++tile) {
    wait_copies<0>();
    __syncthreads();  // the tile has come for all, and all have left the one before
    if constexpr (kShifted) shift_keys(call, tile);
    if ((tile + 1) * kBlockKeys < facts.hull.end) load_keys(call, tile + 1);
    if (tile * kBlockKeys < seen.end && seen.begin < (tile + 1) * kBlockKeys)
      step(call, tile, rules, dropout, softmax, o);
    else
      load_scores(call, tile + 1);
  }
}

// The output tile: rows as they are in the tensor. fp32 accumulators of a quad are 32 bytes of it, 16-bit ones half of that.
inline void stage_output(const Call& call, int r, const Outputs& o, float factor) {
  const LanePlace place;
#pragma unroll
  for (int n = 0; n < kValueTiles; ++n) {
    const float x = o[r / 2][n][r % 2 * 2] * factor, y = o[r / 2][n][r % 2 * 2 + 1] * factor;
    const int byte = place.column(n, 0) * kElementBytes;
    const u32 to =
        call.tiles + kOutputTile.offset(place.row(r), byte / kUnitBytes) + static_cast<u32>(byte % kUnitBytes);
    store_pair(to, x, y);
  }
}

inline void store_results(const Call& call, const Softmax& softmax, const Outputs& o) {
  const ForwardArgs& args = call.args;
  const QueryBlock& block = call.facts.block;
  const LanePlace place;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const RowResult result = row_result(args, block, place.row(r), softmax, r);
    if (call.facts.slice == 0) store_lse(args.lse, block, place.row(r), result.lse);
    stage_output(call, r, o, result.factor);
  }
  __syncwarp();
  const GlobalRows to = slice_of(rows_of(args.o, block.sequence, block.first_query + block.first_row + place.first_row,
                                         block.head, args.value_dim),
                                 call.facts.slice);
  store_rows<kOutputTile>(call.tiles, place.first_row, min_of(block.rows - place.first_row, kWarpRows), to);
}

}  // namespace narrows

extern "C" __global__ void __launch_bounds__(narrows::kThreads, narrows::kBlocksOfMultiprocessor)
    forward_sm80(const __grid_constant__ narrows::ForwardArgs args) {
  using namespace narrows;
  extern __shared__ __align__(128) char tiles[];
  __shared__ Facts facts;
  const Slice slice = Slice::of(blockIdx.x);
  const QueryBlock block = find_query_block(args, args.blocks, args.section, slice.block);
  if (block.rows == 0) return;
  const Call call{args, facts, shared_address(tiles)};
  load_queries(call, block);
  gather_facts(call, block, slice.number);
  Softmax softmax;
  Outputs o = {};
  if (facts.hull.begin < facts.hull.end && !facts.block.broken) attend(call, softmax, o);
  wait_copies<0>();
  __syncthreads();  // all have left the tiles
  store_results(call, softmax, o);
}
