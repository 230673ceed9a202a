// Elements of every type as doubles, and loops split over threads.
#pragma once

#include <narrows/narrows.hpp>

#include <cstdint>
#include <functional>
#include <vector>

namespace narrows::reference {

using Index = std::int64_t;

/// The nearest number that `dtype` can hold, ties to even, overflow to infinity. Floating types only.
double round_to(DType dtype, double value);

double load(const void* data, DType dtype, Index element);
/// Rounds as round_to does.
void store(void* data, DType dtype, Index element, double value);

/// A tensor with its strides spelled out.
class View {
 public:
  View() = default;
  explicit View(const Tensor& tensor);

  bool given() const { return tensor_.given(); }
  std::size_t rank() const { return tensor_.shape.rank(); }
  Index size(std::size_t axis) const { return tensor_.shape[axis]; }
  DType dtype() const { return tensor_.dtype; }

  template <class... Coordinates> double at(Coordinates... coordinates) const {
    return load(tensor_.data, tensor_.dtype, offset({coordinates...}));
  }
  double element(const Dims& coordinates) const { return load(tensor_.data, tensor_.dtype, offset(coordinates)); }
  void set_element(const Dims& coordinates, double value) const {
    store(tensor_.data, tensor_.dtype, offset(coordinates), value);
  }
  template <class... Coordinates> Index integer(Coordinates... coordinates) const {
    return static_cast<Index>(at(coordinates...));
  }
  template <class... Coordinates> void set(double value, Coordinates... coordinates) const {
    store(tensor_.data, tensor_.dtype, offset({coordinates...}), value);
  }

 private:
  Index offset(const Dims& coordinates) const;
  Tensor tensor_;
};

/// The view of a bias or mask as (b, h, sq, sk): axes are matched from the right, missing ones and those of size 1 have
/// stride 0.
View broadcast(const Tensor& tensor);

Dims row_major(const Dims& shape);
Index elements(const Dims& shape);
inline Dims first_of(const Dims& shape) {
  Dims zeros = shape;
  for (std::size_t axis = 0; axis < shape.rank(); ++axis) zeros[axis] = 0;
  return zeros;
}
/// Moves to the next coordinates in row-major order; after the last come the first ones.
void advance(Dims& coordinates, const Dims& shape);

/// task(0) ... task(count - 1), each once, in any order, on up to `threads` threads (0 = every core).
void split(Index count, int threads, const std::function<void(Index)>& task);

template <class Real> class Matrix {
 public:
  Matrix() = default;
  Matrix(Index rows, Index columns) : columns_(columns), data_(static_cast<std::size_t>(rows * columns)) {}
  Real* operator[](Index row) { return data_.data() + row * columns_; }
  const Real* operator[](Index row) const { return data_.data() + row * columns_; }

 private:
  Index columns_ = 0;
  std::vector<Real> data_;
};

}  // namespace narrows::reference
