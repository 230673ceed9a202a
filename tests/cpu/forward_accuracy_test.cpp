// The bar that fp32 holds on ordinary numbers, tighter than the criterion: the relative Frobenius error of a head's O.
#include <gtest/gtest.h>

#include "cpu/reference.hpp"
#include "tests/cpu/forward_run.hpp"

#include <cmath>

namespace narrows::test {
namespace {

/// The largest of any (b, h) of O (b, sq, h, dv).
double largest_relative_error(const Array& o, const std::vector<double>& exact) {
  const Dims& shape = o.shape();
  std::vector<double> error(static_cast<std::size_t>(shape[0] * shape[2])), size(error.size());
  std::size_t element = 0;
  o.for_each([&](const Dims& at) {
    const std::size_t head = static_cast<std::size_t>(at[0] * shape[2] + at[2]);
    const double expected = exact[element++];
    error[head] += (o[at] - expected) * (o[at] - expected);
    size[head] += expected * expected;
  });
  double largest = 0;
  for (std::size_t head = 0; head < error.size(); ++head)
    largest = std::max(largest, std::isnan(error[head]) ? error[head] : std::sqrt(error[head] / size[head]));
  return largest;
}

TEST(CpuForwardAccuracy, fp32_of_normal_numbers_within_a_millionth) {
  for (const std::int64_t d : {64, 128})
    for (const std::int64_t s : {repeats(1024, 160), repeats(1001, 77)})
      for (const Causal causal : {Causal::none, Causal::bottom_right}) {
        Attention a({.b = 1, .sq = s, .sk = s, .h = 2, .hk = 1, .d = d, .dv = d});
        a.options.causal = causal;
        const reference::ForwardResult exact = reference::exact_forward(a.in(), a.options);
        for (const auto* kernels : cpu::available_tile_kernels<float>()) {
          if (kernels->operand != DType::fp32) continue;
          a.o.poison();
          run_planned(a, kernels->name);
          EXPECT_LE(largest_relative_error(a.o, exact.o.value), 1e-6)
              << kernels->name << " d " << d << " s " << s << (causal == Causal::none ? " full" : " causal");
        }
      }
}

}  // namespace
}  // namespace narrows::test
