// Tensors over memory of exactly the bytes that they reach, with any strides.
#pragma once

#include <narrows/narrows.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
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

/// Small numbers of the tensor's type; a quarter of all states gives infinities, NaN and other bytes too.
inline void fill_elements(const Tensor& tensor, std::uint64_t state) {
  const bool wild = state % 4 == 3;
  const auto next = [&] { return state = state * 6364136223846793005u + 1442695040888963407u, state >> 33; };
  constexpr std::array<std::uint16_t, 8> kHalves{0x0000, 0x3C00, 0xBC00, 0x3800, 0x4200, 0xFC00, 0x7E00, 0x8000};
  constexpr std::array<float, 8> kFloats{0, 1, -1, 0.5F, 3, -std::numeric_limits<float>::infinity(), 1e30F, -0.0F};
  each_element(tensor, [&](std::byte* element) {
    const std::uint64_t bits = next();
    const std::size_t chosen = bits % (wild ? 8 : 5);
    const double real = static_cast<double>(kFloats[chosen]);
    const std::uint32_t brain = std::bit_cast<std::uint32_t>(kFloats[chosen]) >> 16;
    const auto small = static_cast<std::int32_t>(bits % 8);
    switch (tensor.dtype) {
      case DType::fp16: std::memcpy(element, &kHalves[chosen], 2); break;
      case DType::bf16: std::memcpy(element, &brain, 2); break;
      case DType::fp32: std::memcpy(element, &kFloats[chosen], 4); break;
      case DType::fp64: std::memcpy(element, &real, 8); break;
      case DType::int32: std::memcpy(element, &small, 4); break;
      default: *element = static_cast<std::byte>(wild ? bits : bits % 2);
    }
  });
}

}  // namespace narrows::fuzz
