// A merge or its gradient, checked: rows of several parts that become one.
#pragma once

#include "core/buffers.hpp"

#include <span>
#include <vector>

namespace narrows {

struct PartViews {
  View o;    // (b, s, h, dv)
  View lse;  // (b, h, s)
};

struct MergeCall {
  Device device;
  DType dtype = DType::fp32;
  i64 batch = 1, rows = 0, heads = 0, value_dim = 0;  // varlen: one batch row
  std::vector<PartViews> parts;
  PartViews out;  // lse null where it is not wanted
  View sinks;     // (h); null = none

  View dout, dlse;                   // of the merged o and lse; dlse null = zeros
  std::vector<PartViews> gradients;  // of each part; null where not wanted
  View dsinks;
};

/// Throws Error before anything is written.
MergeCall make_merge(std::span<const Outputs> parts, const Outputs& out, const Tensor& sinks);
MergeCall make_merge_backward(std::span<const Outputs> parts, const Tensor& dout, const Tensor& dlse,
                              const MergeGradients& out, const Tensor& sinks);

}  // namespace narrows
