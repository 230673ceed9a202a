// What the tests of tile kernels share.
#pragma once

#include "cpu/reference_numbers.hpp"
#include "cpu/scratch.hpp"
#include "cpu/tile_kernels.hpp"
#include "tests/support/tensors.hpp"

#include <cmath>
#include <cstdlib>
#include <limits>
#include <type_traits>
#include <vector>

namespace narrows::cpu {

template <class T> constexpr T kInf = std::numeric_limits<T>::infinity();
template <class T> constexpr T kNaN = std::numeric_limits<T>::quiet_NaN();
template <class T> constexpr double kEpsilon = std::numeric_limits<T>::epsilon();

template <class T> std::vector<DType> storage_types() {
  if constexpr (std::is_same_v<T, double>) return {DType::fp64};
  return {DType::fp16, DType::bf16, DType::fp32};
}

template <class T> Scratch<T> random_scratch(i64 count, std::uint64_t seed) {
  Scratch<T> values = make_scratch<T>(static_cast<std::size_t>(count));
  test::Gaussian next(seed);
  for (i64 x = 0; x < count; ++x) values[static_cast<std::size_t>(x)] = static_cast<T>(next());
  return values;
}

template <class T> Packed* packed(Scratch<T>& values) { return reinterpret_cast<Packed*>(values.get()); }
template <class T> const Packed* packed(const Scratch<T>& values) {
  return reinterpret_cast<const Packed*>(values.get());
}

inline bool same_or_both_nan(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

/// Rows of random numbers with the given element stride in elements; row 1 is missing.
struct Source {
  std::vector<std::uint64_t> memory;
  std::vector<const std::byte*> pointers;
  std::vector<std::vector<double>> expected;
  Rows rows;

  Source(DType dtype, i64 count, i64 length, i64 stride) {
    const i64 size = static_cast<i64>(item_size(dtype)), span = std::abs(stride) * (length - 1) + 1;
    memory.resize(static_cast<std::size_t>(count * span * size / 8 + 1));
    test::Gaussian next(7);
    for (i64 x = 0; x < count * span; ++x) reference::store(memory.data(), dtype, x, next());
    for (i64 r = 0; r < count; ++r) {
      const i64 first = r * span + (stride < 0 ? span - 1 : 0);
      pointers.push_back(r == 1 ? nullptr : reinterpret_cast<const std::byte*>(memory.data()) + first * size);
      expected.emplace_back();
      for (i64 x = 0; x < length; ++x)
        expected.back().push_back(r == 1 ? 0 : reference::load(memory.data(), dtype, first + x * stride));
    }
    rows = {pointers.data(), count, length, stride * size, dtype};
  }
  double at(i64 row, i64 x) const {
    if (row >= rows.count || x >= rows.length) return 0;
    return expected[static_cast<std::size_t>(row)][static_cast<std::size_t>(x)];
  }
};

}  // namespace narrows::cpu
