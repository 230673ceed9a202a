// Tensors for tests: they own their memory, may have gaps and any order of axes, and start as NaN.
#pragma once

#include <narrows/narrows.hpp>

#include "cpu/reference_numbers.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <numbers>
#include <random>
#include <vector>

namespace narrows::test {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinite = std::numeric_limits<double>::infinity();

/// Standard normal numbers, the same from every standard library (whose distributions differ).
class Gaussian {
 public:
  explicit Gaussian(std::uint64_t seed) : bits_(seed) {}
  double operator()() {
    const double radius = std::sqrt(-2 * std::log(1 - uniform()));
    return radius * std::cos(2 * std::numbers::pi * uniform());
  }
  double uniform() { return static_cast<double>(bits_() >> 11) * 0x1p-53; }  // [0, 1)
  std::uint64_t below(std::uint64_t end) { return bits_() % end; }

 private:
  std::mt19937_64 bits_;
};

/// How an array lies in memory: `order` lists the axes outermost first (empty: as they are), and every run of the innermost
/// one is followed by `gap` elements that belong to nothing.
struct Arrangement {
  Dims order;
  std::int64_t gap = 0;
};

/// An owning CPU tensor. Every element, gaps included, starts as NaN (integers and booleans: bytes of 0x7F).
class Array {
 public:
  Array() = default;  // not given
  Array(DType dtype, const Dims& shape, const Arrangement& arrangement = {}) {
    tensor_.dtype = dtype;
    tensor_.shape = tensor_.strides = shape;
    std::int64_t stride = 1;
    for (std::size_t position = shape.rank(); position-- > 0;) {
      const std::size_t axis =
          arrangement.order.empty() ? position : static_cast<std::size_t>(arrangement.order[position]);
      tensor_.strides[axis] = stride;
      stride *= shape[axis];
      if (position + 1 == shape.rank()) stride += arrangement.gap;
    }
    elements_ = stride;
    words_.resize((static_cast<std::size_t>(stride) * item_bytes() + 7) / 8);
    poison();
  }
  Array(DType dtype, const Dims& shape, const std::vector<double>& values) : Array(dtype, shape) {
    std::size_t next = 0;
    for_each([&](const Dims& at) { set(at, values.at(next++)); });
  }

  /// A view that stays valid as long as this array, also when the array is moved.
  Tensor tensor() const {
    Tensor view = tensor_;
    if (view.given()) view.data = const_cast<std::uint64_t*>(words_.data());
    return view;
  }
  operator Tensor() const { return tensor(); }

  const Dims& shape() const { return tensor_.shape; }
  DType dtype() const { return tensor_.dtype; }
  bool given() const { return tensor_.given(); }

  double at(const Dims& where) const { return reference::load(words_.data(), dtype(), offset(where)); }
  void set(const Dims& where, double value) { reference::store(words_.data(), dtype(), offset(where), value); }
  double operator[](const Dims& where) const { return at(where); }

  /// Calls visit(coordinates) in row-major order.
  void for_each(const std::function<void(const Dims&)>& visit) const {
    Dims at = reference::first_of(shape());
    const std::int64_t count = reference::elements(shape());
    for (std::int64_t element = 0; element < count; ++element, reference::advance(at, shape())) visit(at);
  }
  Array& fill(const std::function<double(const Dims&)>& value_at) {
    for_each([&](const Dims& at) { set(at, value_at(at)); });
    return *this;
  }
  Array& fill(double value) {
    return fill([&](const Dims&) { return value; });
  }
  Array& fill_gaussian(std::uint64_t seed, double scale = 1) {
    Gaussian next(seed);
    return fill([&](const Dims&) { return scale * next(); });
  }
  /// Slow waves along every axis and a large offset on one column: what real activations look like more than noise does.
  Array& fill_structured(double phase) {
    return fill([&](const Dims& at) {
      double angle = phase;
      for (std::size_t axis = 0; axis < at.rank(); ++axis)
        angle += static_cast<double>(at[axis]) * (0.37 + 0.61 * static_cast<double>(axis));
      return std::sin(angle) + (at[at.rank() - 1] == 3 ? 4.0 : 0.0);
    });
  }
  Array&
  fill_one_hot() {  // 1 where the last coordinate is the position (second axis of rank 4, first of rank 3) mod its size
    const std::size_t rank = shape().rank();
    return fill([&, rank](const Dims& at) { return at[rank - 1] == at[rank - 3] % shape()[rank - 1] ? 1.0 : 0.0; });
  }
  void poison() {
    if (words_.empty()) return;
    if (tensor_.dtype > DType::fp64) {
      std::memset(words_.data(), 0x7F, words_.size() * 8);
      return;
    }
    const std::int64_t in_word = 8 / static_cast<std::int64_t>(item_bytes());
    for (std::int64_t element = 0; element < in_word; ++element)
      reference::store(words_.data(), tensor_.dtype, element, kNaN);
    std::fill(words_.begin() + 1, words_.end(), words_.front());
  }

  std::vector<double> values() const {  // row-major
    std::vector<double> numbers;
    for_each([&](const Dims& at) { numbers.push_back(this->at(at)); });
    return numbers;
  }
  /// Whether elements that belong to nothing still hold what poison() wrote. Floating types only.
  bool gaps_intact() const {
    Array copy = *this;
    copy.fill(0);
    for (std::int64_t element = 0; element < elements_; ++element) {
      if (reference::load(copy.words_.data(), dtype(), element) == 0) continue;
      if (!std::isnan(reference::load(words_.data(), dtype(), element))) return false;
    }
    return true;
  }
  bool same_bits(const Array& other) const { return words_ == other.words_; }

 private:
  std::int64_t offset(const Dims& where) const {
    std::int64_t sum = 0;
    for (std::size_t axis = 0; axis < where.rank(); ++axis) sum += where[axis] * tensor_.strides[axis];
    return sum;
  }
  std::size_t item_bytes() const { return item_size_of(tensor_.dtype); }
  static std::size_t item_size_of(DType dtype) {
    switch (dtype) {
      case DType::fp16:
      case DType::bf16: return 2;
      case DType::fp32:
      case DType::int32: return 4;
      case DType::fp64:
      case DType::int64: return 8;
      default: return 1;
    }
  }

  Tensor tensor_;
  std::int64_t elements_ = 0;
  std::vector<std::uint64_t> words_;
};

inline Array int32_array(const std::vector<double>& values) {
  return Array(DType::int32, {static_cast<std::int64_t>(values.size())}, values);
}

inline std::uint16_t bf16_bits(double value) {
  std::uint16_t bits = 0;
  reference::store(&bits, DType::bf16, 0, value);
  return bits;
}
inline std::uint16_t fp16_bits(double value) {
  std::uint16_t bits = 0;
  reference::store(&bits, DType::fp16, 0, value);
  return bits;
}
inline double from_bf16(std::uint16_t bits) { return reference::load(&bits, DType::bf16, 0); }
inline double from_fp16(std::uint16_t bits) { return reference::load(&bits, DType::fp16, 0); }

}  // namespace narrows::test
