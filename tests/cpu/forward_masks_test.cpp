// Counting: with Q = 0 exp(LSE) rounds to the number of keys that a row sees, and V = one-hot(j mod d) says which. A tolerance
// cannot see one key too many; this does.
#include <gtest/gtest.h>

#include "tests/cpu/forward_run.hpp"
#include "tests/support/counting.hpp"

namespace narrows::test {
namespace {

class CpuForwardCounting : public testing::TestWithParam<CountingLayout> {};

TEST_P(CpuForwardCounting, every_mask_shows_exactly_its_keys) {
  std::vector<Dims> sizes{{45, 83}, {83, 45}, {1, 70}};
  sizes.resize(static_cast<std::size_t>(repeats(3, 1)));
  for (const CountingRule& rule : counting_rules())
    for (const Dims& size : sizes)
      for (const std::string& set : instruction_sets()) {
        Counting c(rule, GetParam(), type_for(set, rule.own_shift ? DType::fp64 : DType::fp32), size[0], size[1]);
        if (rule.key_begin || rule.key_end) c.poison_unseen();
        run_forward(c.a, {set, 2, 10, 16, 2});
        ASSERT_NO_FATAL_FAILURE(expect_counted(c));
      }
}

TEST_P(CpuForwardCounting, C08_rows_of_no_sequence_are_zero_and_minus_infinity) {
  Counting c(counting_rules()[1], GetParam(), DType::bf16, 20, 40);
  run_forward(c.a);
  expect_blank_rows(c);
}

INSTANTIATE_TEST_SUITE_P(All, CpuForwardCounting, kCountingLayouts, layout_name);

TEST(CpuForward, E06_windows_that_cover_everything_equal_causal_bit_for_bit) {
  Attention causal({1, 70, 70, 2, 1, 16, 16});
  causal.options.causal = Causal::bottom_right;
  run_forward(causal);
  for (const Window window : {Window{-1, 0}, Window{70, 0}, Window{69, 0}}) {
    Attention a({1, 70, 70, 2, 1, 16, 16});
    a.options.window = window;
    run_forward(a);
    EXPECT_TRUE(a.o.same_bits(causal.o) && a.lse.same_bits(causal.lse)) << window.left;
  }
}

}  // namespace
}  // namespace narrows::test
