// What the backward pass must know of each query row: its LSE as the exponent takes it, and delta = rowsum(dO * O) - dLSE; and
// the blocks' parts of dsink = sum exp(sink - LSE) (dLSE - rowsum(dO * O)).
//
// A thread block takes a block of query rows of one head, 8 lanes a row.
#include "kernels/sequences.cuh"
#include "shared/backward_args.h"

namespace narrows {

constexpr int kLanesOfRow = 8, kRowsAtOnce = kThreads / kLanesOfRow;

struct Row {
  const char *o, *dout;
  i64 o_stride, dout_stride;  // from element to element
  i32 columns;
};

// The lane's part of rowsum(dO * O): units of 16 bytes where rows are such units.
inline float products(const Row& row, int lane) {
  float sum = 0.f;
  if constexpr (kCopyBytes == 16) {
    constexpr int elements = 16 / kElementBytes;
#pragma unroll 2
    for (int c = lane * elements; c < row.columns; c += kLanesOfRow * elements) {
      const uint4 a = *reinterpret_cast<const uint4*>(row.o + c * kElementBytes);
      const uint4 b = *reinterpret_cast<const uint4*>(row.dout + c * kElementBytes);
      const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) sum += dot_of_word(x[i], y[i]);
    }
  } else {
    for (int c = lane; c < row.columns; c += kLanesOfRow)
      sum += load_element(row.o + c * row.o_stride, kElement) * load_element(row.dout + c * row.dout_stride, kElement);
  }
  return sum;
}

inline const char* row_of(const TensorArg& tensor, const QueryBlock& block, i32 row) {
  return tensor.data + block.sequence * tensor.strides[0] + i64{block.first_query + row} * tensor.strides[1] +
         block.head * tensor.strides[2];
}

inline float lse_of(const TensorArg& tensor, const QueryBlock& block, i32 row) {
  return *reinterpret_cast<const float*>(tensor.data + block.sequence * tensor.strides[0] +
                                         block.head * tensor.strides[1] +
                                         i64{block.first_query + row} * tensor.strides[2]);
}

// As RowFacts has it.
inline float reference_of_row(const Units<float>& units, float lse) {
  if (lse == -kInfinity<float>) return kInfinity<float>;
  if constexpr (kNatural) return lse;
  const BackwardReference<float> reference = backward_reference<ScalarMath>(units, lse);
  return reference.base != 0.f ? -kInfinity<float> : reference.subtrahend;
}

// All rows of the block. Returns the thread's part of dsink.
inline float make_rows(const BackwardArgs& args, const QueryBlock& block, RowFacts* facts, float sink) {
  const int lane = static_cast<int>(threadIdx.x) % kLanesOfRow;
  float dsink = 0.f;
  for (int r = static_cast<int>(threadIdx.x) / kLanesOfRow; r < kBlockQueries; r += kRowsAtOnce) {
    const i32 row = block.first_row + r;
    const bool exists = row < block.queries;
    float delta = 0.f, lse = -kInfinity<float>;
    if (exists) {
      delta = products({row_of(args.o, block, row), row_of(args.dout, block, row), args.o.strides[3],
                        args.dout.strides[3], args.value_dim},
                       lane);
      lse = lse_of(args.lse, block, row);
    }
#pragma unroll
    for (int mask = 1; mask < kLanesOfRow; mask *= 2) delta += lane_xor(delta, mask);
    if (exists && args.dlse.data) delta -= lse_of(args.dlse, block, row);
    if (lane != 0) continue;
    facts[r] = {reference_of_row(args.units, lse), delta};
    if (exists && sink != -kInfinity<float>) dsink -= exp2_approx((sink - lse) * static_cast<float>(kLog2e)) * delta;
  }
  return dsink;
}

// One number of all threads' parts, always added in the same order.
inline float block_sum(float part) {
  __shared__ float parts[kThreads / kWarp];
#pragma unroll
  for (int mask = 1; mask < kWarp; mask *= 2) part += lane_xor(part, mask);
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = part;
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (float one : parts) sum += one;
  return sum;
}

}  // namespace narrows

extern "C" __global__ void __launch_bounds__(narrows::kThreads)
    backward_rows_sm80(const __grid_constant__ narrows::BackwardArgs args) {
  using namespace narrows;
  const QueryBlock block = find_query_block(args, args.query_blocks, 1, blockIdx.x);
  const bool varlen = args.cu_seqlens_q.data != nullptr;
  const BlockPlace place = block_place(varlen, block.sequence, block.head, args.heads, block.first_query,
                                       block.first_row / kBlockQueries, kBlockQueries);
  float sink = -kInfinity<float>;
  if (args.dsinks.data) sink = load_element(args.sinks.data + block.head * args.sinks.strides[0], args.sinks.element);
  float dsink = 0.f;
  if (block.rows > 0) dsink = make_rows(args, block, args.rows + place.number(args.query_blocks) * kBlockQueries, sink);
  if (block.broken) dsink = as_float(0x7fffffffu);
  if (args.sink_sums == nullptr) return;
  dsink = block_sum(dsink);
  const i64 blocks = varlen ? args.query_blocks : i64{args.batch} * args.query_blocks;
  const i64 number = varlen ? place.block : i64{block.sequence} * args.query_blocks + place.block;
  if (threadIdx.x == 0) args.sink_sums[block.head * blocks + number] = dsink;
}
