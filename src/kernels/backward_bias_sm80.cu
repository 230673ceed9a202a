// dbias: the gradient of the logits, summed over what the bias was broadcast to.
//
// A thread block makes one tile of dbias and computes all steps that belong to it, in one order: sequences, heads and, where the
// bias has one row or one key for all, blocks of these.
#include "kernels/backward_step.cuh"

namespace narrows {

constexpr int kSumStride = kBlockQueries + 1;  // fp32 sums of a key, without bank conflicts
static_assert(kBlockKeys * kSumStride * 4 <= kKeyTile.bytes() + kValueTile.bytes() + kQueryTile.bytes() +
                                                 kOutputTile.bytes() + 2 * kScoreTile.bytes());

// What a thread block's tile of dbias covers of each axis.
struct Covered {
  Range sequences, heads, query_tiles, key_blocks;
};

inline Range covered(i64 index, i32 size, i64 all) { return size == 1 ? Range{0, all} : Range{index, index + 1}; }

struct TileOfBias {
  i64 sequence, head, query_tile, key_block;  // 0 where it is broadcast
};

inline TileOfBias tile_of(const BackwardArgs& args, u32 index) {
  const u32 key_blocks = static_cast<u32>(ceil_div(args.bias_sizes[3], kBlockKeys));
  const u32 query_tiles = static_cast<u32>(ceil_div(args.bias_sizes[2], kBlockQueries));
  const u32 rest = index / key_blocks, pair = rest / query_tiles, heads = static_cast<u32>(args.bias_sizes[1]);
  return {pair / heads, pair % heads, rest % query_tiles, index % key_blocks};
}

// One step's gradients, added to the lane's sums.
inline void add_step(const Call& call, const Place& place, const DropoutRule& dropout, Scores& sums) {
  __syncthreads();  // all have left the tiles, and see the block's facts
  load_keys(call);
  load_queries(call, 0, place);
  load_outputs(call, 0, place);
  wait_copies<0>();
  __syncthreads();
  if (LanePlace().column_warp() >= kScoreWarps) return;
  Scores p, g;
  Tangents tangents;
  make_gradients(call, 0, place, true, dropout, p, g, tangents);
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
    for (int j = 0; j < kQueryTiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[t][j][i] += g[t][j][i];
}

// All heads of one sequence; the keys are block `number` of it.
inline void add_sequence(const Call& call, const Covered& tile, i32 sequence, i32 number, const DropoutRule& dropout,
                         Scores& sums) {
  const BackwardArgs& args = call.args;
  KeyBlock block{};
  static_cast<SequenceFacts&>(block) = facts_of(args, part_of(args, query_bounds(args), sequence, false),
                                                part_of(args, key_bounds(args), sequence, false), false);
  block.first = number * kBlockKeys;
  block.seeing = query_rows(query_range(args.visibility, keys_of(block), block.queries, block.shift));
  const i64 tiles = min_of<i64>(tile.query_tiles.end, query_tiles(block));
  if (block.first >= block.keys && !block.broken) return;
  for (i64 head = tile.heads.begin; head < tile.heads.end; ++head) {
    __syncthreads();  // all have left the facts of before
    block.kv_head = static_cast<i32>(head) / args.group;
    if (threadIdx.x == 0) call.facts.block = block;
    for (i64 t = tile.query_tiles.begin; t < tiles && !block.broken; ++t)
      add_step(call, {static_cast<i32>(head), static_cast<i32>(t)}, dropout, sums);
  }
  if (block.broken) each_score(sums, [](int, int, int, float& x) { x = as_float(0x7fffffffu); });
}

inline float& sum_at(char* tiles, i32 query, i32 key) {
  return reinterpret_cast<float*>(tiles)[key * kSumStride + query];
}

// The lanes' sums to shared memory, and from there, over the axes that are broadcast, to dbias.
inline void store_bias(const BackwardArgs& args, const TileOfBias& tile, char* tiles, const Scores& sums) {
  const LanePlace place;
  __syncthreads();
  if (place.column_warp() < kScoreWarps)
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int j = 0; j < kQueryTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) sum_at(tiles, place.query(j, e), place.key(r)) = sums[r / 2][j][r % 2 * 2 + e];
  __syncthreads();
  const bool one_row = args.bias_sizes[2] == 1, one_key = args.bias_sizes[3] == 1;
  const i32 rows = one_row ? 1 : kBlockQueries, keys = one_key ? 1 : kBlockKeys;
  const i64 first_row = tile.query_tile * kBlockQueries, first_key = tile.key_block * kBlockKeys;
  const TensorArg& to = args.dbias;
  char* const first = to.data + tile.sequence * to.strides[0] + tile.head * to.strides[1] + first_row * to.strides[2] +
                      first_key * to.strides[3];
  for (i32 index = static_cast<i32>(threadIdx.x); index < rows * keys; index += kThreads) {
    const i32 row = index / keys, key = index % keys;
    if (first_row + row >= args.bias_sizes[2] || first_key + key >= args.bias_sizes[3]) continue;
    float sum = 0.f;
    for (i32 i = one_row ? 0 : row; i < (one_row ? kBlockQueries : row + 1); ++i)
      for (i32 j = one_key ? 0 : key; j < (one_key ? kBlockKeys : key + 1); ++j) sum += sum_at(tiles, i, j);
    store_number(first + row * to.strides[2] + key * to.strides[3], to.element, sum);
  }
}

}  // namespace narrows

extern "C" __global__ void __launch_bounds__(narrows::kThreads, narrows::kBlocksOfMultiprocessor)
    backward_bias_sm80(const __grid_constant__ narrows::BackwardArgs args) {
  using namespace narrows;
  extern __shared__ __align__(128) char tiles[];
  __shared__ Facts facts;
  const Call call{args, facts, shared_address(tiles)};
  const TileOfBias tile = tile_of(args, blockIdx.x);
  const Covered axes{covered(tile.sequence, args.bias_sizes[0], args.batch),
                     covered(tile.head, args.bias_sizes[1], args.heads),
                     covered(tile.query_tile, args.bias_sizes[2], kMaxCount),
                     covered(tile.key_block, args.bias_sizes[3], ceil_div(args.key_rows, kBlockKeys))};
  const DropoutRule dropout = kDropout ? dropout_rule(args) : DropoutRule{};
  if (threadIdx.x == 0) facts.far = !kNatural && *args.far_rows != 0;
  Scores sums = {};
  const bool broken = bounds_break(args, query_bounds(args)) || bounds_break(args, key_bounds(args));
  if (broken) each_score(sums, [](int, int, int, float& x) { x = as_float(0x7fffffffu); });
  for (i64 s = axes.sequences.begin; s < axes.sequences.end && !broken; ++s)
    for (i64 number = axes.key_blocks.begin; number < axes.key_blocks.end; ++number)
      add_sequence(call, axes, static_cast<i32>(s), static_cast<i32>(number), dropout, sums);
  store_bias(args, tile, tiles, sums);
}
