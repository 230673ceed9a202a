// The gradient of a merge, a step of it (merge_args.h); a warp takes every so many rows, or heads.
#include "kernels/merge_gradients.cuh"

extern "C" __global__ void __launch_bounds__(narrows::kMergeWarps* narrows::kWarp)
    merge_backward_sm80(const __grid_constant__ narrows::MergeBackwardArgs args) {
  using namespace narrows;
  wait_for_previous();
  let_next_begin();
  const i64 first = i64{blockIdx.x} * kMergeWarps + threadIdx.x / kWarp, step = i64{gridDim.x} * kMergeWarps;
  if constexpr (kMergeStep == MergeStep::sinks) {
    for (i64 h = first; h < args.heads; h += step) sink_gradient(args, h);
  } else {
    for (i64 row = first; row < args.batch * args.rows * args.heads; row += step) {
      const i64 query = row / args.heads, b = query / args.rows, i = query % args.rows, h = row % args.heads;
      if constexpr (kMergeStep == MergeStep::rows)
        share_row(args, b, i, h);
      else
        part_gradients(args, b, i, h);
    }
  }
}
