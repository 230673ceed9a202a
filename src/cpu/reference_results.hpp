// What the two halves of the oracle share beyond its public functions.
#pragma once

#include "cpu/reference.hpp"
#include "cpu/reference_scores.hpp"

namespace narrows::reference {

inline Result make_result(const Dims& shape, double value) {
  const std::size_t count = static_cast<std::size_t>(elements(shape));
  return {shape, std::vector<double>(count, value), std::vector<double>(count), std::vector<double>(count)};
}

/// The numbers of a result as a row-major fp64 tensor.
inline Tensor tensor_of(std::vector<double>& numbers, const Dims& shape) { return view(numbers.data(), shape); }

/// Rounds each value of a result into a tensor of the same shape; nothing if there is no such tensor.
void store_result(const Result& result, const Tensor& tensor);

template <class Real> ForwardResult run_forward(const Inputs& in, const Options& options, Rounding rounding);
extern template ForwardResult run_forward<double>(const Inputs&, const Options&, Rounding);
extern template ForwardResult run_forward<float>(const Inputs&, const Options&, Rounding);

}  // namespace narrows::reference
