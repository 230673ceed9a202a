// dQ from the sums that key blocks have added to: scaled, in the tensor's dtype and strides. Rows that are not used become 0.
//
// A thread block takes a block of query rows of one head; a warp 16 rows and 8 columns at a time, as they lie in scratch.
#include "kernels/backward_tiles.cuh"

namespace narrows {

inline void store_pair(char* at, i64 column_stride, bool together, i32 valid, float first, float second) {
  if constexpr (kElement == Element::fp32) {
    if (valid > 0) *reinterpret_cast<float*>(at) = first;
    if (valid > 1) *reinterpret_cast<float*>(at + column_stride) = second;
  } else {
    const u32 pair = pack(first, second);
    if (together && valid > 1) {
      *reinterpret_cast<u32*>(at) = pair;
      return;
    }
    if (valid > 0) *reinterpret_cast<unsigned short*>(at) = static_cast<unsigned short>(pair);
    if (valid > 1) *reinterpret_cast<unsigned short*>(at + column_stride) = static_cast<unsigned short>(pair >> 16);
  }
}

// 16 rows and 8 columns of dQ, of which a lane holds 4.
inline void store_tile(const BackwardArgs& args, const QueryBlock& block, const float* sums, int row_tile,
                       int column_tile) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, column = column_tile * 8 + lane % 4 * 2;
  float x[4];
  if constexpr (kVectorSums) {
    const float4 four = *reinterpret_cast<const float4*>(sums + sum_place(row_tile, column_tile, lane, 0));
    x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = sums[sum_place(row_tile, column_tile, lane, i)];
  }
  const TensorArg& dq = args.dq;
  const i64 stride = dq.strides[3];
  char* const first = dq.data + block.sequence * dq.strides[0] +
                      i64{block.first_query + block.first_row} * dq.strides[1] + block.head * dq.strides[2] +
                      column * stride;
  const bool together =
      stride == kElementBytes && (reinterpret_cast<u64>(first) | static_cast<u64>(dq.strides[1])) % 4 == 0;
  const float nan = as_float(0x7fffffffu);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const i32 row = row_tile * 16 + h * 8 + lane / 4;
    if (row >= block.rows) continue;
    const bool exists = block.first_row + row < block.queries;
    float pair[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) pair[e] = block.broken ? nan : exists ? x[2 * h + e] * args.rules.scale : 0.f;
    store_pair(first + row * dq.strides[1], stride, together, args.head_dim - column, pair[0], pair[1]);
  }
}

}  // namespace narrows

extern "C" __global__ void __launch_bounds__(narrows::kThreads)
    backward_queries_sm80(const __grid_constant__ narrows::BackwardArgs args) {
  using namespace narrows;
  const QueryBlock block = find_query_block(args, args.query_blocks, 1, blockIdx.x);
  if (block.rows == 0) return;
  const BlockPlace place = block_place(is_varlen(args.cu_seqlens_q), block.sequence, block.head, args.heads,
                                       block.first_query, block.first_row / kBlockQueries, kBlockQueries);
  const float* const sums = args.query_sums + place.number(args.query_blocks) * kSumsOfBlock;
  constexpr int columns = kHeadDim / 8, tiles = kBlockQueries / 16 * columns;
#pragma unroll 4
  for (int tile = static_cast<int>(threadIdx.x / kWarp); tile < tiles; tile += kThreads / kWarp)
    store_tile(args, block, sums, tile / columns, tile % columns);
}
