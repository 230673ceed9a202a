// A row of O and its LSE from those over parts of its keys, by one warp: each lane weighs a part, then sums up some columns.
#pragma once
#include "kernels/elements.cuh"
#include "shared/merge.h"
#include "shared/merge_args.h"

namespace narrows {

inline char* place(const TensorArg& tensor, i64 a, i64 b, i64 c) {
  return tensor.data + a * tensor.strides[0] + b * tensor.strides[1] + c * tensor.strides[2];
}

inline float sink_of(const TensorArg& sinks, i64 h) {
  return sinks.data ? load_element(sinks.data + h * sinks.strides[0], sinks.element) : -kInfinity<float>;
}

// Of a row, the weights of at most 32 parts. A lane has its part's.
struct RowWeights {
  Merge<float> merge;
  float weight;
  u32 some;  // parts that are not empty: an empty one's O may never have been written

  RowWeights(const MergePart* parts, i32 count, float sink, i64 b, i64 i, i64 h) {
    const i32 lane = static_cast<i32>(threadIdx.x % kWarp);
    const float lse = lane < count ? load_element(place(parts[lane].lse, b, h, i), Element::fp32) : -kInfinity<float>;
    const float largest = fmaxf(warp_max(lse), sink);
    merge = {largest, warp_sum(relative_weight<ScalarMath>(lse, largest)) + relative_weight<ScalarMath>(sink, largest)};
    weight = part_weight<ScalarMath>(merge, lse);
    some = __ballot_sync(~0u, lse != -kInfinity<float>);
  }
};

inline void merge_row(const MergeArgs& args, i64 b, i64 i, i64 h) {
  const i32 lane = static_cast<i32>(threadIdx.x % kWarp);
  const RowWeights row(args.parts, args.count, sink_of(args.sinks, h), b, i, h);
  for (i32 first = 0; first < args.value_dim; first += kWarp) {
    const i32 x = first + lane;
    float sum = 0;
    for (i32 part = 0; part < args.count; ++part) {
      const float own = __shfl_sync(~0u, row.weight, part);
      if (!(row.some >> part & 1) || x >= args.value_dim) continue;
      const TensorArg& o = args.parts[part].o;
      sum = __fmaf_rn(own, load_element(place(o, b, i, h) + x * o.strides[3], kElement), sum);
    }
    if (x < args.value_dim) store_number(place(args.out.o, b, i, h) + x * args.out.o.strides[3], kElement, sum);
  }
  if (lane == 0 && args.out.lse.data)
    store_number(place(args.out.lse, b, h, i), Element::fp32, merged_lse<ScalarMath>(row.merge));
}

}  // namespace narrows
