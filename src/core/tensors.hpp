// Rules for a single tensor: memory, dtype, shape; and its View and Layout.
#pragma once

#include "core/error.hpp"
#include "core/problem.hpp"

#include <span>

namespace narrows {

/// Where each axis of a View comes from in a tensor; -1 = stride 0.
using Axes = std::array<int, 4>;
inline constexpr Axes kDense{0, 1, 2, 3}, kVarlen{-1, 0, 1, 2}, kDenseLse{0, 1, 2, -1}, kVarlenLse{-1, 0, 1, -1};
/// alibi_slopes as (b, h), from (h) or (b, h).
inline Axes slope_axes(const Tensor& slopes) {
  return slopes.shape.rank() == 2 ? Axes{0, 1, -1, -1} : Axes{-1, 0, -1, -1};
}

/// In elements; row-major where none are given; 0 for a size-1 axis, and where there is no element to step to.
i64 stride(const Tensor& tensor, std::size_t axis);
i64 elements(const Tensor& tensor);
View view_of(const Tensor& tensor, const Axes& axes);
Layout layout_of(const Tensor& tensor);

/// Sizes, strides and address of any tensor of a call on `device`. needs_data: elements will be read or written.
void check_memory(std::string_view argument, const Tensor& tensor, const Device& device, bool needs_data);
void check_dtype(std::string_view argument, const Tensor& tensor, DType expected, std::string_view why);
void check_floating(std::string_view argument, const Tensor& tensor);
/// `named`: the shape in the contract's letters, such as "(b, sq, h, dv)".
void check_shape(std::string_view argument, const Tensor& tensor, const Dims& expected, std::string_view named);
/// Elements of an output must not share memory: no zero stride, no overlap.
void check_output_strides(std::string_view argument, const Tensor& tensor);
/// A result must not start where another tensor of the call does: one would be read after the other is written.
struct Other {
  std::string_view name;
  const Tensor* tensor;
};
void check_apart(std::string_view argument, const Tensor& result, std::span<const Other> others);
/// A boolean mask or a bias (b, h, sq, sk), broadcast from the right; `queries` and `keys` are sizes to equal, or with
/// `at_least` (varlen and cache calls) the longest sequence's, to reach: 0 where only the device knows it.
struct Broadcast {
  i64 batch, heads, queries, keys;
  bool at_least;
};
void check_broadcast(std::string_view argument, const Tensor& tensor, const Broadcast& full);
View broadcast_view(const Tensor& tensor);

}  // namespace narrows
