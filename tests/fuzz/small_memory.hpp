// Tensors over memory of exactly the bytes that they reach, with any strides.
#pragma once

#include <narrows/narrows.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace narrows::fuzz {

using i64 = std::int64_t;
using Wide = __int128;

constexpr i64 kMostElements = 2048;  // of a tensor that has memory: the rest have none, so nothing may touch them
constexpr i64 kMostBytes = 1 << 15;

struct Memory {
  std::unique_ptr<std::byte[]> bytes;
  std::vector<std::byte> before;
  std::size_t size = 0;
  std::size_t first = 0;  // byte of element (0, ..., 0)

  void remember() { before.assign(bytes.get(), bytes.get() + size); }
};

inline Wide step_of(const Tensor& tensor, std::size_t axis) {
  if (!tensor.strides.empty()) return tensor.strides[axis];
  Wide step = 1;
  for (std::size_t inner = axis + 1; inner < tensor.shape.rank(); ++inner) step *= tensor.shape[inner] % (i64{1} << 30);
  return step;
}

/// Lowest and highest element that the strides reach; false if the tensor is not small.
inline bool small_reach(const Tensor& tensor, Wide& low, Wide& high) {
  if (!tensor.strides.empty() && tensor.strides.rank() != tensor.shape.rank()) return false;
  Wide count = 1;
  for (std::size_t axis = 0; axis < tensor.shape.rank(); ++axis) {
    const i64 size = tensor.shape[axis];
    if (size < 0) return false;
    if (size == 0) return low = 0, high = -1, true;
  }
  for (std::size_t axis = 0; axis < tensor.shape.rank(); ++axis) {
    const Wide size = tensor.shape[axis];
    if (size > kMostElements || (count *= size) > kMostElements) return false;
    const Wide along = size > 1 ? step_of(tensor, axis) * (size - 1) : 0;
    (along < 0 ? low : high) += along;
  }
  return high - low < kMostBytes / static_cast<Wide>(std::max<std::size_t>(item_size(tensor.dtype), 1));
}

/// Calls `visit` with the address of every element, in logical order.
template <class Visit> void each_element(const Tensor& tensor, Visit visit) {
  std::array<i64, Dims::kMaxRank> index{};
  const std::size_t rank = tensor.shape.rank();
  if (std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end()) return;
  for (;;) {
    Wide element = 0;
    for (std::size_t axis = 0; axis < rank; ++axis)
      if (tensor.shape[axis] > 1) element += step_of(tensor, axis) * index[axis];
    visit(static_cast<std::byte*>(tensor.data) +
          static_cast<std::ptrdiff_t>(element) * static_cast<std::ptrdiff_t>(item_size(tensor.dtype)));
    std::size_t axis = rank;
    while (axis > 0 && ++index[axis - 1] == tensor.shape[axis - 1]) index[--axis] = 0;
    if (axis == 0) return;
  }
}

}  // namespace narrows::fuzz
