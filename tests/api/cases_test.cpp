// Every row of tests/cases.jsonl on every family that must accept it: against the oracle, by counting, and bit for bit.
#include "tests/support/case_probe.hpp"
#include "tests/support/check.hpp"

namespace narrows::test {
namespace {

class Cases : public testing::TestWithParam<std::size_t> {
 protected:
  void SetUp() override { row_ = make_case(GetParam()); }
  Case row_;
};

TEST_P(Cases, forward_meets_the_criterion) {
  SCOPED_TRACE(row_.name());
  for (const std::string& family : row_.families) {
    row_.call.options.family = family;
    row_.call.o.poison();
    row_.call.lse.poison();
    const Inputs in = inputs(row_);
    forward(in, row_.call.out(), row_.call.options);
    EXPECT_TRUE(forward_agrees(in, row_.call.out(), row_.call.options));
    EXPECT_TRUE(row_.call.o.gaps_intact());
    EXPECT_TRUE(row_.call.lse.gaps_intact());
  }
}

TEST_P(Cases, counting_probe_sees_exactly_the_visible_keys) {
  SCOPED_TRACE(row_.name());
  make_counting(row_);
  Options& options = row_.call.options;
  const Inputs in = inputs(row_);
  const reference::ForwardResult exact = reference::exact_forward(in, options);
  for (const std::string& family : row_.families) {
    options.family = family;
    row_.call.o.poison();
    row_.call.lse.poison();
    forward(in, row_.call.out(), options);
    ASSERT_NO_FATAL_FAILURE(expect_counts(row_, in, exact));
  }
}

TEST_P(Cases, bits_do_not_depend_on_threads_and_repeat) {
  SCOPED_TRACE(row_.name());
  const Inputs in = inputs(row_);
  forward(in, row_.call.out(), row_.call.options);
  const Array o = row_.call.o, lse = row_.call.lse;
  for (const int threads : {1, 2, 5}) {
    row_.call.options.threads = threads;
    row_.call.o.poison();
    row_.call.lse.poison();
    forward(in, row_.call.out(), row_.call.options);
    EXPECT_TRUE(row_.call.o.same_bits(o)) << threads << " threads";
    EXPECT_TRUE(row_.call.lse.same_bits(lse)) << threads << " threads";
  }
}

INSTANTIATE_TEST_SUITE_P(table, Cases, testing::Range(std::size_t{0}, case_count()));

}  // namespace
}  // namespace narrows::test
