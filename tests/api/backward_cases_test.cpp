// Every row of tests/cases.jsonl backward, by the public call: against the oracle, and bit for bit. The counting probes of
// backward are in tests/cpu.
#include "cpu/reference.hpp"
#include "tests/support/backward_case.hpp"
#include "tests/support/check.hpp"

namespace narrows::test {
namespace {

const Arrangement kGaps{.order = {}, .gap = 3};

class BackwardCases : public testing::TestWithParam<std::size_t> {
 protected:
  void SetUp() override {
    c_ = BackwardRow(GetParam(), kGaps);
    if (!c_.is_cache_call()) forward(c_.forward_in(), c_.row.call.out(), c_.options());
  }
  BackwardRow c_;
};

TEST_P(BackwardCases, meet_the_criterion) {
  SCOPED_TRACE(c_.row.name());
  if (c_.is_cache_call()) {
    EXPECT_THROW(backward(c_.in, c_.out, c_.options()), Error);
    return;
  }
  reference::forward(c_.forward_in(), c_.row.call.out(), c_.options());
  for (const std::string& family : case_families(GetParam(), DeviceKind::cpu, Operation::backward)) {
    c_.row.call.options.family = family;
    c_.poison();
    backward(c_.in, c_.out, c_.options());
    EXPECT_TRUE(backward_agrees(c_.in, c_.out, c_.options()));
    for (const Array& array : c_.results) EXPECT_TRUE(array.gaps_intact());
  }
}

TEST_P(BackwardCases, bits_do_not_depend_on_threads_and_repeat) {
  if (c_.is_cache_call()) return;
  SCOPED_TRACE(c_.row.name());
  backward(c_.in, c_.out, c_.options());
  const std::deque<Array> first = c_.results;
  for (const int threads : {1, 2, 5}) {
    c_.row.call.options.threads = threads;
    c_.poison();
    backward(c_.in, c_.out, c_.options());
    for (std::size_t x = 0; x < first.size(); ++x)
      EXPECT_TRUE(c_.results[x].same_bits(first[x])) << threads << " " << x;
  }
}

INSTANTIATE_TEST_SUITE_P(table, BackwardCases, testing::Range(std::size_t{0}, case_count()));

}  // namespace
}  // namespace narrows::test
