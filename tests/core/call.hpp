// A legal call on a few real bytes that a test then breaks in one place.
#pragma once

#include "core/error.hpp"
#include "core/problem.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <string>
#include <vector>

namespace narrows::test {

/// Owns the int32 values of a length tensor.
class Ints {
 public:
  Ints(std::initializer_list<std::int32_t> values)
      : values_(values), shape_{static_cast<std::int64_t>(values.size())} {}
  Ints(std::vector<std::int32_t> values, const Dims& shape) : values_(std::move(values)), shape_(shape) {}
  operator Tensor() { return view(values_.data(), shape_); }

 private:
  std::vector<std::int32_t> values_;
  Dims shape_;
};

/// The text with which call.make() is refused; empty if it is not.
template <class Made> std::string refusal_of(const Made& call) {
  try {
    call.make();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

/// Every tensor looks at the same zeroed memory, but for results, which have their own.
struct TestCall {
  std::vector<double> memory = std::vector<double>(1 << 14), o_memory = memory, lse_memory = memory,
                      gradient_memory = memory;
  Inputs in;
  Outputs out;
  Options options;

  Tensor tensor(const Dims& shape, DType dtype = DType::fp32) { return {memory.data(), dtype, shape, {}, {}}; }

  /// Dense q (2, 5, 4, 8), k (2, 7, 2, 8), v (2, 7, 2, 6).
  static TestCall dense(DType dtype = DType::fp32) {
    TestCall call;
    call.in = {call.tensor({2, 5, 4, 8}, dtype), call.tensor({2, 7, 2, 8}, dtype), call.tensor({2, 7, 2, 6}, dtype)};
    call.out = {{call.o_memory.data(), dtype, {2, 5, 4, 6}, {}, {}},
                {call.lse_memory.data(), dtype == DType::fp64 ? DType::fp64 : DType::fp32, {2, 4, 5}, {}, {}}};
    return call;
  }
  /// q (10, 4, 8), k (14, 2, 8), v (14, 2, 6); the bounds are the caller's.
  static TestCall varlen() {
    TestCall call;
    call.in = {call.tensor({10, 4, 8}), call.tensor({14, 2, 8}), call.tensor({14, 2, 6})};
    call.out = {{call.o_memory.data(), DType::fp32, {10, 4, 6}, {}, {}},
                {call.lse_memory.data(), DType::fp32, {4, 10}, {}, {}}};
    return call;
  }
  /// q (2, 1, 4, 8), pages of 4 slots: k (6, 4, 2, 8), v (6, 4, 2, 6).
  static TestCall paged() {
    TestCall call;
    call.in = {call.tensor({2, 1, 4, 8}), call.tensor({6, 4, 2, 8}), call.tensor({6, 4, 2, 6})};
    call.out = {{call.o_memory.data(), DType::fp32, {2, 1, 4, 6}, {}, {}},
                {call.lse_memory.data(), DType::fp32, {2, 4, 1}, {}, {}}};
    return call;
  }

  Call make() const { return make_forward(in, out, options); }
  std::string refusal() const { return refusal_of(*this); }
};

}  // namespace narrows::test
