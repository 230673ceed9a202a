#include "tests/support/counting_backward.hpp"

#include <array>

namespace narrows::test {
namespace {

/// Where a row of q, k and their like lies, or one of lse.
Dims place(const Counting& c, std::size_t s, std::int64_t row, std::int64_t head, std::int64_t x) {
  if (c.varlen) return {row, head, x};
  return {static_cast<std::int64_t>(s), row, head, x};
}
Dims lse_place(const Counting& c, std::size_t s, std::int64_t row, std::int64_t head) {
  if (c.varlen) return {head, row};
  return {static_cast<std::int64_t>(s), head, row};
}

std::int64_t columns(const Array& array) { return array.shape()[array.shape().rank() - 1]; }

/// 0, or one-hot in the row's number.
void fill_row(const Counting& c, Array& array, std::size_t s, std::int64_t first, std::int64_t row, std::int64_t head,
              bool one_hot) {
  for (std::int64_t x = 0; x < columns(array); ++x)
    array.set(place(c, s, first + row, head, x), one_hot && row % columns(array) == x ? 1 : 0);
}

}  // namespace

void make_counting(Counting& c, CountedGradient which) {
  Attention& a = c.a;
  a.options.scale = 1;
  for (Array* array : {&a.q, &a.k, &a.v, &a.o, &a.dout, &a.lse, &a.dlse, &a.dq, &a.dk, &a.dv}) array->poison();
  for (std::size_t s = 0; s < c.sequences.size(); ++s) {
    const Counting::Lengths& lengths = c.sequences[s];
    for (std::int64_t h = 0; h < Counting::kHeads; ++h)
      for (std::int64_t i = 0; i < lengths.queries; ++i) {
        fill_row(c, a.q, s, lengths.first_query, i, h, which == CountedGradient::dk);
        fill_row(c, a.o, s, lengths.first_query, i, h, false);
        fill_row(c, a.dout, s, lengths.first_query, i, h, which == CountedGradient::dv);
        const Dims at = lse_place(c, s, lengths.first_query + i, h);
        a.lse.set(at, 0);
        a.dlse.set(at, which == CountedGradient::dv ? 0 : 1);
      }
    for (std::int64_t j = 0; j < lengths.keys; ++j) {
      fill_row(c, a.k, s, lengths.first_key, j, 0, which == CountedGradient::dq);
      fill_row(c, a.v, s, lengths.first_key, j, 0, false);
    }
  }
}

void expect_counted(const Counting& c, CountedGradient which) {
  const Array& result = *std::array{&c.a.dq, &c.a.dk, &c.a.dv}[static_cast<std::size_t>(which)];
  Array expected(result.dtype(), result.shape());
  expected.fill(0);
  for (std::size_t s = 0; s < c.sequences.size(); ++s) {
    const Counting::Lengths& lengths = c.sequences[s];
    for (std::int64_t h = 0; h < Counting::kHeads; ++h)
      for (std::int64_t i = 0; i < lengths.queries; ++i)
        for (std::int64_t j = 0; j < lengths.keys; ++j) {
          if (!sees(c.rule, lengths, h, i, j)) continue;
          const Dims at = which == CountedGradient::dq ? place(c, s, lengths.first_query + i, h, j % columns(result))
                                                       : place(c, s, lengths.first_key + j, 0, i % columns(result));
          expected.set(at, expected[at] + 1);
        }
  }
  result.for_each([&](const Dims& at) {
    ASSERT_EQ(result[at], expected[at]) << c.rule.name << " element " << at[0] << " " << at[1] << " " << at[2];
  });
}

}  // namespace narrows::test
