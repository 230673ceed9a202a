// Counting of gradients over every mask rule and layout, and memory that belongs to no sequence.
#include "tests/support/counting_backward.hpp"

namespace narrows::test {
namespace {

class CpuBackwardCounting : public testing::TestWithParam<CountingLayout> {};

TEST_P(CpuBackwardCounting, every_mask_counts_exactly_its_pairs) {
  for (const CountingRule& rule : counting_rules())
    for (const CountedGradient which : {CountedGradient::dq, CountedGradient::dk, CountedGradient::dv}) {
      Counting c(rule, GetParam(), DType::fp32, 37, 83);
      make_counting(c, which);
      backward(c.a.backward_in(), c.a.gradients(), c.a.options);
      ASSERT_NO_FATAL_FAILURE(expect_counted(c, which)) << static_cast<int>(which);
    }
}

INSTANTIATE_TEST_SUITE_P(All, CpuBackwardCounting, kCountingLayouts, layout_name);

}  // namespace
}  // namespace narrows::test
