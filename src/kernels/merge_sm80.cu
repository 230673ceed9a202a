// O and LSE of rows from those over parts of their keys; a warp takes every so many rows.
#include "kernels/merge_rows.cuh"

extern "C" __global__ void __launch_bounds__(narrows::kMergeWarps* narrows::kWarp)
    merge_sm80(const __grid_constant__ narrows::MergeArgs args) {
  using namespace narrows;
  wait_for_previous();
  let_next_begin();
  const i64 rows = args.batch * args.rows * args.heads, step = i64{gridDim.x} * kMergeWarps;
  for (i64 row = i64{blockIdx.x} * kMergeWarps + threadIdx.x / kWarp; row < rows; row += step) {
    const i64 query = row / args.heads;
    merge_row(args, query / args.rows, query % args.rows, row % args.heads);
  }
}
