#include "core/tensors.hpp"

#include <algorithm>
#include <limits>
#include <span>

namespace narrows {
namespace {

constexpr i64 kMost = std::numeric_limits<i64>::max();

/// Bytes between the lowest and the highest address that the strides reach; refuses what 63 bits cannot hold.
void check_reach(std::string_view argument, const Tensor& tensor) {
  for (const i64 size : tensor.shape)
    if (size < 0) refuse_value(argument, text("shape ", tensor.shape), "sizes must be >= 0", "0");
  i64 reach = 0;
  i64 count = 1;
  for (std::size_t axis = 0; axis < tensor.shape.rank(); ++axis) {
    const i64 size = tensor.shape[axis];
    if (size == 0) return;
    if (__builtin_mul_overflow(count, size, &count))
      refuse_value(argument, text("shape ", tensor.shape), "the number of elements must be below 2^63");
    i64 step = 0;
    const i64 along = size > 1 && !tensor.strides.empty() ? tensor.strides[axis] : 0;
    if (along == std::numeric_limits<i64>::min() ||
        __builtin_mul_overflow(size - 1, along < 0 ? -along : along, &step) ||
        __builtin_add_overflow(reach, step, &reach))
      refuse_value(argument, text("strides ", tensor.strides), "byte offsets must be below 2^63");
  }
  if (std::max(reach, count) > kMost / static_cast<i64>(item_size(tensor.dtype)))
    refuse_value(argument, text("shape ", tensor.shape), "byte offsets must be below 2^63");
}

}  // namespace

i64 stride(const Tensor& tensor, std::size_t axis) {
  if (tensor.shape[axis] == 1 || elements(tensor) == 0) return 0;
  if (!tensor.strides.empty()) return tensor.strides[axis];
  i64 step = 1;
  for (std::size_t inner = axis + 1; inner < tensor.shape.rank(); ++inner) step *= tensor.shape[inner];
  return step;
}

i64 elements(const Tensor& tensor) {
  i64 count = 1;
  for (const i64 size : tensor.shape) count *= size;
  return count;
}

View view_of(const Tensor& tensor, const Axes& axes) {
  View view{static_cast<std::byte*>(tensor.data), tensor.dtype, {}};
  for (std::size_t i = 0; i < axes.size(); ++i)
    if (axes[i] >= 0)
      view.strides[i] = stride(tensor, static_cast<std::size_t>(axes[i])) * static_cast<i64>(item_size(tensor.dtype));
  return view;
}

Layout layout_of(const Tensor& tensor) {
  Layout layout;
  layout.given = tensor.given();
  if (!layout.given) return layout;
  if (elements(tensor) == 0) {
    layout.unit_last = true;
    return layout;
  }
  const std::size_t last = tensor.shape.rank() - 1;
  layout.unit_last = tensor.shape[last] == 1 || stride(tensor, last) == 1;
  layout.heads_adjoin = layout.unit_last && last > 0 && stride(tensor, last - 1) == tensor.shape[last];
  std::uintptr_t bits = reinterpret_cast<std::uintptr_t>(tensor.data) | 128;
  layout.elements = 1;
  for (std::size_t axis = 0; axis < tensor.shape.rank(); ++axis) {
    const i64 step = stride(tensor, axis);
    if (step != 0) layout.elements *= tensor.shape[axis];
    const bool is_near = step >= 0 && step < (i64{1} << 40) / static_cast<i64>(item_size(tensor.dtype));
    layout.near_strides = layout.near_strides && (is_near || tensor.shape[axis] == 1);
    if (step == 0) layout.expanded = layout.expanded || tensor.shape[axis] > 1;
    if (axis != last) bits |= static_cast<std::uintptr_t>(step) * item_size(tensor.dtype);
  }
  layout.alignment = static_cast<int>(bits & (~bits + 1));
  return layout;
}

void check_memory(std::string_view argument, const Tensor& tensor, const Device& device, bool needs_data) {
  if (!tensor.given()) refuse_value(argument, "not given", "this argument is required");
  if (item_size(tensor.dtype) == 0)
    refuse_type(argument, static_cast<std::int64_t>(tensor.dtype), "must be one of the dtypes of narrows::DType");
  if (tensor.device != device) refuse_type(argument, tensor.device, text("must be on ", device, " with the others"));
  if (!tensor.strides.empty() && tensor.strides.rank() != tensor.shape.rank())
    refuse_value(argument, text("strides ", tensor.strides), text("one stride for each axis of shape ", tensor.shape));
  check_reach(argument, tensor);
  if (!needs_data || elements(tensor) == 0) return;
  if (!tensor.data) refuse_value(argument, "null data", text("shape ", tensor.shape, " has elements"));
  if (reinterpret_cast<std::uintptr_t>(tensor.data) % item_size(tensor.dtype) != 0)
    refuse_value(argument, "data address",
                 text("must be a multiple of the item size, ", static_cast<i64>(item_size(tensor.dtype))));
}

void check_dtype(std::string_view argument, const Tensor& tensor, DType expected, std::string_view why) {
  if (tensor.dtype != expected) refuse_type(argument, tensor.dtype, why, to_text(expected));
}

void check_floating(std::string_view argument, const Tensor& tensor) {
  if (!is_floating(tensor.dtype)) refuse_type(argument, tensor.dtype, "must be fp16, bf16, fp32 or fp64", "fp32");
}

void check_shape(std::string_view argument, const Tensor& tensor, const Dims& expected, std::string_view named) {
  if (tensor.shape != expected)
    refuse_value(argument, text("shape ", tensor.shape), text("must be ", named, " = ", expected), to_text(expected));
}

void check_output_strides(std::string_view argument, const Tensor& tensor) {
  if (elements(tensor) == 0) return;
  struct Axis {
    i64 step, size;
  };
  std::array<Axis, Dims::kMaxRank> axes;  // ascending by step
  std::size_t count = 0;
  for (std::size_t axis = 0; axis < tensor.shape.rank(); ++axis) {
    if (tensor.shape[axis] == 1) continue;
    const i64 step = std::abs(stride(tensor, axis));
    std::size_t place = count++;
    for (; place > 0 && axes[place - 1].step > step; --place) axes[place] = axes[place - 1];
    axes[place] = {step, tensor.shape[axis]};
  }
  i64 reached = 0;  // by the axes with smaller strides
  for (const Axis& axis : std::span(axes.data(), count)) {
    if (axis.step <= reached)
      refuse_value(argument, text("strides ", tensor.strides), "elements of an output must not share memory");
    reached += axis.step * (axis.size - 1);
  }
}

void check_apart(std::string_view argument, const Tensor& result, std::span<const Other> others) {
  if (elements(result) == 0) return;
  for (const Other& other : others)
    if (other.tensor->given() && elements(*other.tensor) != 0 && other.tensor->data == result.data)
      refuse_value(argument, text("address of ", other.name), "must be memory of its own");
}

void check_broadcast(std::string_view argument, const Tensor& tensor, const Broadcast& full) {
  const std::size_t rank = tensor.shape.rank();
  if (rank > 4) refuse_value(argument, text("shape ", tensor.shape), "must have at most 4 axes (b, h, sq, sk)");
  const Dims target{full.batch, full.heads, full.queries, full.keys};
  constexpr std::array<std::string_view, 4> kLetters{"b", "h", "sq", "sk"};
  for (std::size_t axis = 4 - rank; axis < 4; ++axis) {
    const i64 size = tensor.shape[axis - (4 - rank)];
    if (size == 1 || size == target[axis]) continue;
    if (axis >= 2 && full.at_least && size > target[axis]) continue;
    refuse_value(argument, text("shape ", tensor.shape),
                 text("must broadcast to (b, h, sq, sk) = ", target, "; its ", kLetters[axis], " axis is ", size),
                 text("1 or ", target[axis]));
  }
}

View broadcast_view(const Tensor& tensor) {
  const int missing = 4 - static_cast<int>(tensor.shape.rank());
  Axes axes{};
  for (int i = 0; i < 4; ++i) axes[static_cast<std::size_t>(i)] = i - missing;
  for (int& axis : axes) axis = std::max(axis, -1);
  return view_of(tensor, axes);
}

}  // namespace narrows
