// O = softmax(scale * Q K^T) V and its LSE, on every GPU since Ampere: mma.sync on tiles that cp.async brings.
//
// A thread block keeps some query rows of one head on chip and walks over the tiles of keys that any of them sees; each warp
// has its own 16 or 32 rows and skips tiles that none of these sees. Tile n + 1 is on its way while tile n is computed: two
// stages, one barrier a tile. Shared memory: Q, then the stages, each K then V; at the end the output takes their place.
#include "kernels/copy_tile.cuh"
#include "kernels/softmax.cuh"

namespace narrows {

constexpr int kStageBytes = kKeyTile.bytes() + kValueTile.bytes();
constexpr SmemTile kOutputTile{kBlockQueries, kValueBytes};

struct Call {
  const ForwardArgs& args;
  const QueryBlock& block;  // in shared memory: the loop over tiles needs few of its facts and every register
  u32 shared;               // address of the tiles
  const Keys* rows;         // what each row sees
  const Sight* sights;      // what each warp's rows see

  u32 stage(i32 tile) const { return shared + static_cast<u32>(kQueryTile.bytes() + tile % 2 * kStageBytes); }
};

inline void load_queries(const Call& call) {
  const QueryBlock& block = call.block;
  const GlobalRows q =
      rows_of(call.args.q, block.sequence, block.first_query + block.first_row, block.head, call.args.head_dim);
  copy_tile<kQueryTile>(call.shared, Pieces<kQueryTile>::own(q), 0, block.queries - block.first_row);
}

// The rows of K and V that are next to come.
struct KeySource {
  GlobalRows k, v;

  KeySource(const Call& call, i32 first) {
    const ForwardArgs& args = call.args;
    const QueryBlock& block = call.block;
    const i32 kv_head = block.head / args.group, row = block.first_key + first;
    k = Pieces<kKeyTile>::own(rows_of(args.k, block.sequence, row, kv_head, args.head_dim));
    v = Pieces<kValueTile>::own(rows_of(args.v, block.sequence, row, kv_head, args.value_dim));
  }
  // Keys outside the hull are not read: no row of this block sees them, and perhaps no row at all.
  void load(u32 stage, i32 first, Keys hull) {
    copy_tile<kKeyTile>(stage, k, hull.begin - first, hull.end - first);
    copy_tile<kValueTile>(stage + kKeyTile.bytes(), v, hull.begin - first, hull.end - first);
    commit_copies();
    k.first += kBlockKeys * k.row_stride;
    v.first += kBlockKeys * v.row_stride;
  }
};

inline void scale_rows(Outputs& o, const float (&factor)[kRows]) {
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
    for (int n = 0; n < kValueTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[t][n][i] *= factor[2 * t + i / 2];
}

// A warp's rows against one tile. common: the keys that each row sees.
inline void step(const Call& call, i32 tile, const Keys& common, const HeadRules& rules, const DropoutRule& dropout,
                 Softmax& softmax, Outputs& o) {
  const i32 first = tile * kBlockKeys;
  Scores s;
  multiply_keys(s, call.shared, LanePlace().first_row, call.stage(tile));
  if constexpr (kNatural) make_logits(s, call.args, call.block, rules, first);
  if (first < common.begin || common.end < first + kBlockKeys) hide_unseen(s, call.rows, first);
  if constexpr (kMask) hide_masked(s, call.args, call.block, rules, first);
  float factor[kRows];
  weigh(softmax, s, factor, call.args.units);
  scale_rows(o, factor);
  if constexpr (kDropout) drop(s, dropout, call.block, first);
  multiply_values(o, s, call.stage(tile) + kKeyTile.bytes());
}

inline void attend(const Call& call, Keys hull, Softmax& softmax, Outputs& o) {
  const Sight& sight = call.sights[threadIdx.x / kWarp];
  const HeadRules rules(call.args, call.block);
  const DropoutRule dropout = kDropout ? dropout_rule(call.args) : DropoutRule{};
  const i32 first = hull.begin / kBlockKeys, last = ceil_div(hull.end, kBlockKeys);
  KeySource source(call, first * kBlockKeys);
  source.load(call.stage(first), first * kBlockKeys, hull);
  for (i32 tile = first; tile < last; ++tile) {
    wait_copies<0>();
    __syncthreads();  // the tile has come for all, and all have left the one before
    if (tile + 1 < last) source.load(call.stage(tile + 1), (tile + 1) * kBlockKeys, hull);
    const bool sees = tile * kBlockKeys < sight.hull.end && sight.hull.begin < (tile + 1) * kBlockKeys;
    if (sees) step(call, tile, sight.common, rules, dropout, softmax, o);
  }
}

inline void store_lse(const Call& call, int r, float lse) {
  const QueryBlock& block = call.block;
  const TensorArg& to = call.args.lse;
  const LanePlace place;
  if (to.data == nullptr || place.lane % 4 != 0 || place.row(r) >= block.rows) return;
  const i64 row = block.first_query + block.first_row + place.row(r);
  *reinterpret_cast<float*>(to.data + block.sequence * to.strides[0] + block.head * to.strides[1] +
                            row * to.strides[2]) = lse;
}

// The output tile: rows as they are in the tensor. fp32 accumulators of a quad are 32 bytes of it, 16-bit ones half of that.
inline void stage_output(const Call& call, int r, const Outputs& o, float factor) {
  const LanePlace place;
#pragma unroll
  for (int n = 0; n < kValueTiles; ++n) {
    const float x = o[r / 2][n][r % 2 * 2] * factor, y = o[r / 2][n][r % 2 * 2 + 1] * factor;
    const int byte = place.column(n, 0) * kElementBytes;
    const u32 to =
        call.shared + kOutputTile.offset(place.row(r), byte / kUnitBytes) + static_cast<u32>(byte % kUnitBytes);
    if constexpr (kElement == Element::fp32) {
      store_shared(to, as_bits(x));
      store_shared(to + 4, as_bits(y));
    } else {
      store_shared(to, pack(x, y));
    }
  }
}

inline void store_results(const Call& call, const Softmax& softmax, const Outputs& o) {
  const ForwardArgs& args = call.args;
  const QueryBlock& block = call.block;
  const LanePlace place;
  const float nan = as_float(0x7fffffffu);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    RowResult result = row_result(args.units, softmax.maximum[r], quad_sum(softmax.sum[r]), args.sinks, block.head);
    if (block.first_row + place.row(r) >= block.queries) result = {kHidden, 0.f};  // no query: no sink either
    if (block.broken) result = {nan, nan};
    if constexpr (kDropout) result.factor *= keep_factor<float>(args.dropout);
    store_lse(call, r, result.lse);
    stage_output(call, r, o, result.factor);
  }
  __syncwarp();
  const GlobalRows to = rows_of(args.o, block.sequence, block.first_query + block.first_row + place.first_row,
                                block.head, args.value_dim);
  store_rows<kOutputTile>(call.shared, place.first_row, min_of(block.rows - place.first_row, kWarpRows), to);
}

}  // namespace narrows

extern "C" __global__ void __launch_bounds__(narrows::kThreads, narrows::kBlocksOfMultiprocessor)
    forward_sm80(const __grid_constant__ narrows::ForwardArgs args) {
  using namespace narrows;
  extern __shared__ __align__(128) char tiles[];
  __shared__ Keys rows[kBlockQueries];
  __shared__ Sight sights[kWarps];
  __shared__ QueryBlock block;
  const QueryBlock found = find_block(args, blockIdx.x);
  if (found.rows == 0) return;
  if (threadIdx.x == 0) block = found;
  const Call call{args, block, shared_address(tiles), rows, sights};
  look(args, found, rows, sights);
  __syncthreads();
  load_queries(call);
  const Keys hull = block_hull(sights);
  Softmax softmax;
  Outputs o = {};
  if (hull.begin < hull.end && !block.broken) attend(call, hull, softmax, o);
  wait_copies<0>();  // also of queries that saw no key
  __syncthreads();   // all have left the tiles
  store_results(call, softmax, o);
}
