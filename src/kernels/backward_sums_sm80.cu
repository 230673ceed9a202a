// dslopes and dsinks: each is a sum of what thread blocks have left in scratch, made in one order.
//
// A thread block makes one number of each. Block x: sequence x / heads where a gradient is a sequence's own, head x % heads.
#include "kernels/sequences.cuh"
#include "shared/backward_args.h"

namespace narrows {

// Of values [begin, end).
inline float ordered_sum(const float* values, i64 begin, i64 end) {
  __shared__ float parts[kThreads];
  float part = 0.f;
  for (i64 i = begin + threadIdx.x; i < end; i += kThreads) part += values[i];
  __syncthreads();
  parts[threadIdx.x] = part;
  __syncthreads();
  float sum = 0.f;
  if (threadIdx.x == 0)
    for (float one : parts) sum += one;
  return sum;
}

inline void make_slope(const BackwardArgs& args, i32 sequence, i32 head) {
  const bool varlen = is_varlen(args.cu_seqlens_k), of_sequence = args.slopes_of_sequences;
  const i64 blocks = varlen ? args.key_blocks : i64{args.batch} * args.key_blocks;
  i64 begin = 0, end = blocks;
  if (of_sequence && !varlen) {
    begin = i64{sequence} * args.key_blocks;
    end = begin + args.key_blocks;
  } else if (of_sequence) {
    const i32 first = clamp_to(at(args.cu_seqlens_k, sequence), 0, args.key_rows);
    const i32 last = clamp_to(at(args.cu_seqlens_k, sequence + 1), first, args.key_rows);
    begin = first_block(first, sequence, kBlockKeys);
    end = first_block(last, sequence + 1, kBlockKeys);
  }
  const bool broken = bounds_break(args, query_bounds(args)) || bounds_break(args, key_bounds(args));
  const float sum = broken ? as_float(0x7fffffffu) : ordered_sum(args.slope_sums + head * blocks, begin, end);
  if (threadIdx.x == 0)
    store_number(args.dslopes.data + sequence * args.dslopes.strides[0] + head * args.dslopes.strides[1],
                 args.dslopes.element, sum);
}

}  // namespace narrows

extern "C" __global__ void __launch_bounds__(narrows::kThreads)
    backward_sums_sm80(const __grid_constant__ narrows::BackwardArgs args) {
  using namespace narrows;
  const i32 head = static_cast<i32>(blockIdx.x) % args.heads, sequence = static_cast<i32>(blockIdx.x) / args.heads;
  if (args.dslopes.data) make_slope(args, sequence, head);
  if (args.dsinks.data == nullptr || sequence > 0) return;
  const i64 blocks = is_varlen(args.cu_seqlens_q) ? args.query_blocks : i64{args.batch} * args.query_blocks;
  const float sum = ordered_sum(args.sink_sums + head * blocks, 0, blocks);
  if (threadIdx.x == 0) store_number(args.dsinks.data + head * args.dsinks.strides[0], args.dsinks.element, sum);
}
