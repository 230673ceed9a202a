// What the copy engine of Hopper and later is told of a tensor.
#pragma once

#include "core/problem.hpp"
#include "shared/forward_sm90_args.h"

namespace narrows::cuda {

/// (b, s, h, d) without strides. Varlen: one sequence.
struct TensorSizes {
  i64 sequences = 0, rows = 0, heads = 0, columns = 0;
};

/// Boxes of `box_rows` rows and 64 columns of 16-bit elements, swizzled as kernels/smem_tile.cuh says; what of a box lies outside
/// the tensor is read as 0. The planner has seen to the layout.
TensorMap tensor_map(const View& view, const TensorSizes& sizes, i64 box_rows);

}  // namespace narrows::cuda
