// Every row of tests/cases.jsonl on every family that must accept it: against the oracle, by counting, and bit for bit.
#include "tests/support/cases.hpp"
#include "core/error.hpp"
#include "cpu/reference.hpp"
#include "cpu/reference_numbers.hpp"
#include "tests/support/check.hpp"

#include <cmath>

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

/// With Q = 0 every visible key weighs the same: exp(LSE) is their number, and V = one-hot(j mod dv) says which they are.
/// A tolerance cannot see one key too many in a long row; a count can.
TEST_P(Cases, counting_probe_sees_exactly_the_visible_keys) {
  SCOPED_TRACE(row_.name());
  row_.call.q.fill(0);
  row_.call.v.fill_one_hot();
  Options& options = row_.call.options;
  options.alibi_slopes = options.bias = options.sinks = {};
  options.dropout = 0;
  if (const Tensor& fresh = options.v_new; fresh.given()) {
    const std::int64_t dv = fresh.shape[fresh.shape.rank() - 1];
    Dims at = reference::first_of(fresh.shape);
    for (std::int64_t element = 0; element < reference::elements(fresh.shape); ++element) {
      reference::View(fresh).set_element(at, element / dv % dv == element % dv ? 1 : 0);
      reference::advance(at, fresh.shape);
    }
  }
  const Inputs in = inputs(row_);
  const reference::ForwardResult exact = reference::exact_forward(in, options);
  for (const std::string& family : row_.families) {
    options.family = family;
    forward(in, row_.call.out(), options);
    const std::vector<double> lse = row_.call.lse.values(), o = row_.call.o.values();
    const std::size_t dv = static_cast<std::size_t>(in.v.shape[in.v.shape.rank() - 1]);
    const std::int64_t h = in.q.shape[in.q.shape.rank() - 2];
    const bool packed = in.q.shape.rank() == 3;
    const std::int64_t sq = in.q.shape[packed ? 0 : 1];
    for (std::size_t element = 0; element < lse.size(); ++element) {
      const double keys = std::exp(exact.lse.value[element]);
      ASSERT_EQ(std::round(std::exp(lse[element])), std::round(keys)) << "LSE element " << element;
      // lse is (b, h, sq) or (h, total); o is (b, sq, h, dv) or (total, h, dv).
      const std::int64_t e = static_cast<std::int64_t>(element);
      const std::int64_t i = e % sq, head = e / sq % h, b = e / sq / h;
      const std::size_t first = static_cast<std::size_t>((b * sq + i) * h + head) * dv;
      for (std::size_t c = first; c < first + dv; ++c)
        ASSERT_EQ(std::round(o[c] * keys), std::round(exact.o.value[c] * keys)) << "O element " << c;
    }
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
