// The counting probe on rows of tests/cases.jsonl. With Q = 0 every visible key weighs the same: exp(LSE) is their number, and
// V = one-hot(j mod dv) says which they are. A tolerance cannot see one key too many in a long row; a count can.
#pragma once

#include "cpu/reference.hpp"
#include "cpu/reference_numbers.hpp"
#include "tests/support/cases.hpp"

#include <cmath>

#include <gtest/gtest.h>

namespace narrows::test {

inline void make_counting(Case& row) {
  row.call.q.fill(0);
  row.call.v.fill_one_hot();
  Options& options = row.call.options;
  options.alibi_slopes = options.bias = options.sinks = {};
  options.dropout = 0;
  const Tensor& fresh = options.v_new;
  if (!fresh.given()) return;
  const std::int64_t dv = fresh.shape[fresh.shape.rank() - 1];
  Dims at = reference::first_of(fresh.shape);
  for (std::int64_t element = 0; element < reference::elements(fresh.shape); ++element) {
    reference::View(fresh).set_element(at, element / dv % dv == element % dv ? 1 : 0);
    reference::advance(at, fresh.shape);
  }
}

/// exact: of the same call.
inline void expect_counts(const Case& row, const Inputs& in, const reference::ForwardResult& exact) {
  const std::vector<double> lse = row.call.lse.values(), o = row.call.o.values();
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

}  // namespace narrows::test
