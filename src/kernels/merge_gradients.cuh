// Gradients of a merge, by a warp: dO_p = w_p dO and dLSE_p = w_p (dO . (O_p - O) + dLSE), of the sink w (dLSE - dO . O). Where a weight
// is 0 they are 0, whatever the part holds.
#pragma once
#include "kernels/merge_rows.cuh"

namespace narrows {

inline i64 number_of(const MergeBackwardArgs& args, i64 b, i64 i, i64 h) {
  return (b * args.rows + i) * args.heads + h;
}

// dO . O of a part's row.
inline float dot_row(const MergeBackwardArgs& args, const TensorArg& o, i64 b, i64 i, i64 h) {
  const char *const left = place(args.dout, b, i, h), *const right = place(o, b, i, h);
  float sum = 0;
  for (i32 x = static_cast<i32>(threadIdx.x % kWarp); x < args.value_dim; x += kWarp)
    sum = __fmaf_rn(load_element(left + x * args.dout.strides[3], kElement),
                    load_element(right + x * o.strides[3], kElement), sum);
  return warp_sum(sum);
}

// What all parts' gradients take: dO . O is the weighted sum of dO . O_p.
inline void share_row(const MergeBackwardArgs& args, i64 b, i64 i, i64 h) {
  const RowWeights row(args.parts, args.count, sink_of(args.sinks, h), b, i, h);
  float dot = 0;
  for (i32 part = 0; part < args.count; ++part) {
    const float own = __shfl_sync(~0u, row.weight, part);
    if (row.some >> part & 1) dot = __fmaf_rn(own, dot_row(args, args.parts[part].o, b, i, h), dot);
  }
  const float dlse = args.dlse.data ? load_element(place(args.dlse, b, h, i), Element::fp32) : 0.f;
  if (threadIdx.x % kWarp == 0) args.merged[number_of(args, b, i, h)] = {row.merge.largest, row.merge.sum, dlse - dot};
}

inline float weight_of(const MergedRow& row, float lse) {
  return part_weight<ScalarMath>(Merge<float>{row.largest, row.sum}, lse);
}

inline void part_gradients(const MergeBackwardArgs& args, i64 b, i64 i, i64 h) {
  const i32 lane = static_cast<i32>(threadIdx.x % kWarp);
  const MergedRow row = args.merged[number_of(args, b, i, h)];
  for (i32 part = 0; part < args.count; ++part) {
    const MergePart &from = args.parts[part], &to = args.parts[kGradientsAt + part];
    const float weight = weight_of(row, load_element(place(from.lse, b, h, i), Element::fp32));
    for (i32 x = lane; to.o.data && x < args.value_dim; x += kWarp)
      store_number(place(to.o, b, i, h) + x * to.o.strides[3], kElement,
                   contribution(weight, load_element(place(args.dout, b, i, h) + x * args.dout.strides[3], kElement)));
    if (!to.lse.data) continue;
    const float gradient = weight == 0.f ? 0.f : weight * (dot_row(args, from.o, b, i, h) + row.gradient);
    if (lane == 0) store_number(place(to.lse, b, h, i), Element::fp32, gradient);
  }
}

// Of a head: each lane sums every so many rows, in their order.
inline void sink_gradient(const MergeBackwardArgs& args, i64 h) {
  const i32 lane = static_cast<i32>(threadIdx.x % kWarp);
  const float sink = sink_of(args.sinks, h);
  double sum = 0;
  for (i64 row = lane; row < args.batch * args.rows; row += kWarp) {
    const MergedRow merged = args.merged[row * args.heads + h];
    sum += static_cast<double>(contribution(weight_of(merged, sink), merged.gradient));
  }
  const float all = warp_sum(static_cast<float>(sum));
  if (lane == 0) store_number(args.dsinks.data + h * args.dsinks.strides[0], args.dsinks.element, all);
}

}  // namespace narrows
