// dQ from the sums that key blocks have added to: scaled, in the tensor's dtype and strides. Rows that are not used become 0.
//
// A thread block takes a block of query rows of one head, those of the call's last heads at first, whose sums L2 still holds; a warp
// 16 rows and 8 columns at a time, as they lie in scratch.
#include "kernels/backward_tiles.cuh"
#include "kernels/copy_tile.cuh"

namespace narrows {

// Four sums of a lane.
struct Sums {
  float x[4];
};

inline Sums load_sums(const float* sums, int row_tile, int column_tile) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  if constexpr (kVectorSums) {
    const float4 four = *reinterpret_cast<const float4*>(sums + sum_place(row_tile, column_tile, lane, 0));
    return {{four.x, four.y, four.z, four.w}};
  } else {
    Sums four;
#pragma unroll
    for (int i = 0; i < 4; ++i) four.x[i] = sums[sum_place(row_tile, column_tile, lane, i)];
    return four;
  }
}

// 16 rows and 8 columns of dQ to the tile of results, of which a lane holds 4.
inline void stage_sums(u32 to, const BackwardArgs& args, const QueryBlock& block, const Sums& sums, int row_tile,
                       int column_tile) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, byte = (column_tile * 8 + lane % 4 * 2) * kElementBytes;
  const float nan = as_float(0x7fffffffu);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const i32 row = row_tile * 16 + h * 8 + lane / 4;
    const bool exists = block.first_row + row < block.queries;
    float pair[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) pair[e] = block.broken ? nan : exists ? sums.x[2 * h + e] * args.rules.scale : 0.f;
    store_pair(to + kQueryTile.offset(row, byte / kUnitBytes) + static_cast<u32>(byte % kUnitBytes), pair[0], pair[1]);
  }
}

}  // namespace narrows

extern "C" __global__ void __launch_bounds__(narrows::kThreads)
    backward_queries_sm80(const __grid_constant__ narrows::BackwardArgs args) {
  using namespace narrows;
  extern __shared__ __align__(128) char results[];  // a tile of Q's shape
  QueryBlock block = find_query_block(args, args.query_blocks, 1, gridDim.x - 1 - blockIdx.x);
  if (block.rows == 0) return wait_for_previous();  // so that this kernel ends after the one ahead
  block.broken |= bounds_break(args, key_bounds(args));
  wait_for_previous();
  const BlockPlace place = block_place(is_varlen(args.cu_seqlens_q), block.sequence, block.head, args.heads,
                                       block.first_query, block.first_row / kBlockQueries, kBlockQueries);
  const float* const sums = args.query_sums + place.number(args.query_blocks) * kSumsOfBlock;
  const int warp = static_cast<int>(threadIdx.x / kWarp), warps = kThreads / kWarp;
  constexpr int columns = kHeadDim / 8, tiles = kBlockQueries / 16 * columns, at_once = 4;
  for (int first = warp; first < tiles; first += at_once * warps) {
    Sums loaded[at_once];
#pragma unroll
    for (int n = 0; n < at_once; ++n)
      if (const int tile = first + n * warps; tile < tiles) loaded[n] = load_sums(sums, tile / columns, tile % columns);
#pragma unroll
    for (int n = 0; n < at_once; ++n)
      if (const int tile = first + n * warps; tile < tiles)
        stage_sums(shared_address(results), args, block, loaded[n], tile / columns, tile % columns);
  }
  __syncthreads();
  constexpr int rows = ceil_div(kBlockQueries, kThreads / kWarp);
  store_any_rows<kQueryTile>(
      shared_address(results), warp * rows, min_of(block.rows - warp * rows, rows),
      rows_of(args.dq, block.sequence, block.first_query + block.first_row + warp * rows, block.head, args.head_dim));
}
