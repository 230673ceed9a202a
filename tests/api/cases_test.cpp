// Every row of tests/cases.jsonl on every family that must accept it: against the oracle, by counting, and bit for bit.
#include "tests/support/cases.hpp"
#include "core/error.hpp"
#include "cpu/reference.hpp"
#include "tests/support/check.hpp"

#include <cmath>

namespace narrows::test {
namespace {

/// Layouts that no array of its own can have: views of it.
Inputs inputs(const Case& row) {
  Inputs in = row.call.in();
  if (row.layout == "expanded") {  // all keys and values equal the first of each head
    in.k.strides[1] = 0;
    in.v.strides[1] = 0;
  } else if (row.layout == "reversed") {
    for (Tensor* tensor : {&in.q, &in.k, &in.v}) {
      auto* last = static_cast<std::byte*>(tensor->data);
      for (std::size_t axis = 0; axis < tensor->shape.rank(); ++axis) {
        last += (tensor->shape[axis] - 1) * tensor->strides[axis] * static_cast<std::int64_t>(item_size(tensor->dtype));
        tensor->strides[axis] = -tensor->strides[axis];
      }
      tensor->data = last;
    }
  } else if (row.layout == "absurd_batch_stride") {
    for (Tensor* tensor : {&in.q, &in.k, &in.v}) tensor->strides[0] = std::numeric_limits<std::int64_t>::max();
  }
  return in;
}

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
