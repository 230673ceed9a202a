// The sets that multiply bf16: those of this machine and the emulated ones, through what they do together, since each packs in
// an order of its own. Against plain loops on operands rounded to bf16.
#include <gtest/gtest.h>

#include "tests/cpu/tile_run.hpp"
#include "tests/support/instruction_sets.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>

namespace narrows::cpu {
namespace {

using Set = TileKernels<float>;

std::vector<const Set*> bf16_kernels() {
  std::vector<const Set*> kernels;
  for (const Set* set : available_tile_kernels<float>())
    if (set->operand == DType::bf16) kernels.push_back(set);
  for (const test::EmulatedSet& emulated : test::emulated_sets()) kernels.push_back(&emulated.set.single);
  return kernels;
}

float rounded(float value) { return static_cast<float>(reference::round_to(DType::bf16, double{value})); }

Scratch<float> poisoned(i64 count) {
  Scratch<float> values = make_scratch<float>(static_cast<std::size_t>(count));
  std::fill_n(values.get(), count, kNaN<float>);
  return values;
}

i64 round_up(i64 count, i64 unit) { return (count + unit - 1) / unit * unit; }
std::size_t place(i64 index) { return static_cast<std::size_t>(index); }

/// The sum of a[x] * b[x] and how far off a sum of fp32 products may be.
struct Dot {
  double sum = 0, size = 0;
  void add(double a, double b) {
    sum += a * b;
    size += std::abs(a * b);
  }
  void expect(double found, i64 terms, const char* what) const {
    ASSERT_NEAR(found, sum, size * 0x1p-23 * static_cast<double>(terms + 1)) << what;
  }
};

TEST(TileKernelsBf16, frames) {
  for (const Set* set : bf16_kernels()) {
    EXPECT_EQ(set->operand, DType::bf16);
    EXPECT_EQ(set->columns % set->depth, 0) << set->name;
    EXPECT_EQ(set->columns, 32) << set->name;
  }
}

TEST(TileKernelsBf16, scores_are_dot_products_of_any_rows_and_touch_no_others) {
  for (const Set* set : bf16_kernels())
    for (const DType query_type : {DType::bf16, DType::fp32})
      for (const i64 stride : {1, 3, 0, -1})
        for (const i64 d : {1, 3, 31, 32, 33, 64, 131, 160}) {
          SCOPED_TRACE(testing::Message() << set->name << " stride " << stride << " d " << d);
          const i64 rows = set->rows, columns = set->columns, depth = round_up(d, set->depth);
          const i64 keys = columns + 5, ld = 2 * columns + 16;
          const Source q(query_type, rows, d, stride), k(DType::bf16, keys, d, stride);
          Scratch<float> panel = poisoned(rows * depth / 2 + 16), strips = poisoned(2 * columns * depth / 2);
          set->pack_query(q.rows, -1.f, packed(panel));
          set->pack_keys(k.rows, packed(strips));
          EXPECT_TRUE(set->all_finite(packed(strips), 2 * columns * depth)) << "padding";
          const Scratch<float> whole = random_scratch<float>(rows * ld, 3);
          set->scores(packed(panel), set->rows, packed(strips), 2, d, whole.get(), ld);
          for (i64 r = 0; r < rows; ++r)
            for (i64 j = 0; j < 2 * columns; ++j) {
              Dot dot;
              for (i64 x = 0; x < d; ++x) dot.add(-rounded(static_cast<float>(q.at(r, x))), k.at(j, x));
              dot.expect(whole[place(r * ld + j)], d, "score");
            }
          if (HasFatalFailure()) return;
          for (int count = 1; count < set->rows; ++count) {
            const Scratch<float> part = random_scratch<float>(rows * ld, 3),
                                 before = random_scratch<float>(rows * ld, 3);
            set->scores(packed(panel), count, packed(strips), 2, d, part.get(), ld);
            for (i64 x = 0; x < rows * ld; ++x)
              ASSERT_EQ(part[place(x)], (x < count * ld ? whole : before)[place(x)])
                  << "count " << count << " at " << x;
          }
        }
}

TEST(TileKernelsBf16, a_short_panel_is_packed_as_if_zeros_followed) {
  for (const Set* set : bf16_kernels())
    for (const i64 count : {i64{1}, i64{2}, i64{set->rows} - 1}) {
      const i64 d = 40, depth = round_up(d, set->depth), columns = set->columns;
      const Source q(DType::bf16, count, d, 1), k(DType::bf16, columns, d, 1);
      Scratch<float> panel = poisoned(set->rows * depth / 2 + 16), strips = poisoned(columns * depth / 2);
      set->pack_query(q.rows, 1.f, packed(panel));
      set->pack_keys(k.rows, packed(strips));
      const Scratch<float> s = poisoned(set->rows * columns);
      set->scores(packed(panel), set->rows, packed(strips), 1, d, s.get(), columns);
      for (i64 r = 0; r < set->rows; ++r)
        for (i64 j = 0; j < columns; ++j)
          ASSERT_EQ(s[place(r * columns + j)] != 0, r != 1 && r < count && j != 1) << set->name << " " << r << " " << j;
    }
}

TEST(TileKernelsBf16, nan_and_infinity_stay_in_their_row_and_column) {
  for (const Set* set : bf16_kernels())
    for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()})
      for (const DType query_type : {DType::bf16, DType::fp32}) {
        const i64 d = 33, depth = round_up(d, set->depth), columns = set->columns;
        Source q(query_type, set->rows, d, 1), k(DType::bf16, columns, d, 1);
        reference::store(q.memory.data(), query_type, 5 * d + 32, bad);
        reference::store(k.memory.data(), DType::bf16, 7 * d + 4, bad);
        Scratch<float> panel = poisoned(set->rows * depth / 2 + 16), strips = poisoned(columns * depth / 2);
        set->pack_query(q.rows, 1.f, packed(panel));
        set->pack_keys(k.rows, packed(strips));
        EXPECT_FALSE(set->all_finite(packed(strips), columns * depth));
        const Scratch<float> s = poisoned(set->rows * columns);
        set->scores(packed(panel), set->rows, packed(strips), 1, d, s.get(), columns);
        for (i64 r = 0; r < set->rows; ++r)
          for (i64 j = 0; j < columns; ++j) {
            // Row 1 is zeros, which a NaN or an infinity makes NaN.
            const float score = s[place(r * columns + j)];
            ASSERT_EQ(std::isfinite(score), r != 5 && j != 7) << set->name << " " << r << " " << j;
            if (std::isnan(bad)) {
              ASSERT_EQ(std::isnan(score), r == 5 || j == 7);
            }
          }
      }
}

/// Rows of weights with columns from `keys` on that no product may read.
struct Weights {
  i64 ld;
  std::vector<float> values;
  Scratch<float> memory;

  Weights(i64 rows, i64 keys) : ld(keys + 16), memory(poisoned(rows * ld)) {
    test::Gaussian next(11);
    for (i64 x = 0; x < rows * keys; ++x) values.push_back(static_cast<float>(next()));
    for (i64 r = 0; r < rows; ++r)
      for (i64 j = 0; j < keys; ++j) memory[place(r * ld + j)] = values[place(r * keys + j)];
  }
};

TEST(TileKernelsBf16, accumulate_adds_weighted_values_for_every_width_and_count) {
  for (const Set* set : bf16_kernels())
    for (const i64 stride : {1, 2, -1})
      for (const i64 dv : {1, 15, 16, 17, 31, 32, 33, 48, 49, 96}) {
        SCOPED_TRACE(testing::Message() << set->name << " stride " << stride << " dv " << dv);
        const i64 rows = set->rows, columns = set->columns, given = columns + 7, keys = 2 * columns;
        const i64 width = round_up(dv, columns);
        const Source v(DType::bf16, given, dv, stride);
        Scratch<float> strips = poisoned(keys * width / 2);
        set->pack_values(v.rows, packed(strips));
        EXPECT_TRUE(set->all_finite(packed(strips), keys * width)) << "padding";
        Weights p(rows, keys);
        for (i64 r = 0; r < rows; ++r) set->narrow(p.memory.get() + r * p.ld, keys);
        const Scratch<float> before = random_scratch<float>(rows * width, 3),
                             whole = random_scratch<float>(rows * width, 3);
        set->accumulate(p.memory.get(), p.ld, set->rows, packed(strips), keys * columns, keys, dv, whole.get(), width);
        for (i64 r = 0; r < rows; ++r)
          for (i64 x = 0; x < dv; ++x) {
            Dot dot;
            dot.add(before[place(r * width + x)], 1);
            for (i64 j = 0; j < keys; ++j) dot.add(rounded(p.values[place(r * keys + j)]), v.at(j, x));
            dot.expect(whole[place(r * width + x)], keys, "output");
          }
        if (HasFatalFailure()) return;
        for (int count = 1; count < set->rows; ++count) {
          const Scratch<float> part = random_scratch<float>(rows * width, 3);
          set->accumulate(p.memory.get(), p.ld, count, packed(strips), keys * columns, keys, dv, part.get(), width);
          for (i64 r = 0; r < rows; ++r)
            for (i64 x = 0; x < (r < count ? dv : width); ++x)
              ASSERT_EQ(part[place(r * width + x)], (r < count ? whole : before)[place(r * width + x)]) << count;
        }
        // Keys from the middle on, as a row that sees no earlier one takes them.
        const Scratch<float> late = random_scratch<float>(rows * width, 3);
        set->accumulate(p.memory.get() + columns / 2, p.ld, set->rows, packed(strips) + columns * columns * 2,
                        keys * columns, columns, dv, late.get(), width);
        Dot dot;
        dot.add(before[0], 1);
        for (i64 j = columns; j < keys; ++j) dot.add(rounded(p.values[place(j)]), v.at(j, 0));
        dot.expect(late[0], columns, "later keys");
      }
}

TEST(TileKernelsBf16, accumulate_transposed_adds_columns_of_weights) {
  for (const Set* set : bf16_kernels())
    for (const i64 dv : {1, 16, 33, 64})
      for (const i64 first_column : {0, 3, 32}) {
        SCOPED_TRACE(testing::Message() << set->name << " dv " << dv << " from column " << first_column);
        const i64 rows = 64, columns = set->columns, wide = 3 * columns, width = round_up(dv, columns);
        const Source v(DType::bf16, rows, dv, 1);
        Scratch<float> strips = poisoned(rows * width / 2);
        set->pack_values(v.rows, packed(strips));
        const Weights p(rows, wide);
        Scratch<float> room = poisoned(rows * p.ld / 2);
        const Packed* operand = set->transposed(p.memory.get(), p.ld, rows, wide, packed(room));
        for (const auto& part : {std::pair{i64{0}, i64{64}}, {i64{32}, i64{32}}, {i64{0}, i64{32}}}) {
          const i64 first_row = part.first, count_rows = part.second;
          const Scratch<float> before = random_scratch<float>(set->rows * width, 3),
                               whole = random_scratch<float>(set->rows * width, 3);
          const auto add = [&](int count, float* o) {
            set->accumulate_transposed(operand, p.ld, first_row, first_column, count,
                                       packed(strips) + first_row * columns * 2, rows * columns, count_rows, dv, o,
                                       width);
          };
          add(set->rows, whole.get());
          for (i64 r = 0; r < set->rows; ++r)
            for (i64 x = 0; x < dv; ++x) {
              Dot dot;
              dot.add(before[place(r * width + x)], 1);
              for (i64 i = first_row; i < first_row + count_rows; ++i)
                dot.add(rounded(p.values[place(i * wide + first_column + r)]), v.at(i, x));
              dot.expect(whole[place(r * width + x)], count_rows, "output");
            }
          if (HasFatalFailure()) return;
          for (int count = 1; count < set->rows; ++count) {
            const Scratch<float> part = random_scratch<float>(set->rows * width, 3);
            add(count, part.get());
            for (i64 r = 0; r < set->rows; ++r)
              for (i64 x = 0; x < (r < count ? dv : width); ++x)
                ASSERT_EQ(part[place(r * width + x)], (r < count ? whole : before)[place(r * width + x)]) << count;
          }
        }
      }
}

TEST(TileKernelsBf16, blocks_of_zero_weights_add_exactly_nothing) {
  for (const Set* set : bf16_kernels()) {
    const i64 columns = set->columns, keys = 3 * columns;
    const Source v(DType::bf16, keys, columns, 1);
    Scratch<float> strips = poisoned(keys * columns / 2);
    set->pack_values(v.rows, packed(strips));
    Weights p(set->rows, keys);
    for (i64 r = 0; r < set->rows; ++r) {
      float* const row = p.memory.get() + r * p.ld;
      std::fill_n(row, columns, 0.f);
      std::fill_n(row + 2 * columns, columns, 0.f);
      set->narrow(row, keys);
    }
    const Scratch<float> all = random_scratch<float>(set->rows * columns, 3),
                         middle = random_scratch<float>(set->rows * columns, 3);
    set->accumulate(p.memory.get(), p.ld, set->rows, packed(strips), keys * columns, keys, columns, all.get(), columns);
    set->accumulate(p.memory.get() + columns / 2, p.ld, set->rows, packed(strips) + columns * columns * 2,
                    keys * columns, columns, columns, middle.get(), columns);
    for (i64 x = 0; x < set->rows * columns; ++x) ASSERT_EQ(all[place(x)], middle[place(x)]) << set->name << " " << x;
  }
}

/// The bf16 that `narrow` and `weights` leave at a column of a row.
float narrowed(const Scratch<float>& row, i64 column) {
  std::uint16_t bits;
  std::memcpy(&bits, reinterpret_cast<const std::byte*>(row.get()) + 2 * column, sizeof bits);
  return static_cast<float>(reference::load(&bits, DType::bf16, 0));
}

TEST(TileKernelsBf16, narrow_rounds_to_nearest_even_in_place) {
  std::vector<float> values{0.f,
                            -0.f,
                            kInf<float>,
                            -kInf<float>,
                            kNaN<float>,
                            -kNaN<float>,
                            3.4e38f,
                            3.3895e38f,
                            -3.4e38f,
                            1.00390625f,
                            1.01171875f,
                            0x1.01fffep0f,
                            std::bit_cast<float>(0x7f800001u),
                            std::bit_cast<float>(0xff80ffffu)};
  for (std::uint32_t step = 0; step < 50000; ++step) {
    const float value = std::bit_cast<float>(step * 85899u);
    if (std::abs(value) >= 0x1p-125f || value != value) values.push_back(value);  // instructions flush what is smaller
  }
  values.resize(values.size() / 32 * 32);
  const i64 count = static_cast<i64>(values.size());
  for (const Set* set : bf16_kernels()) {
    Scratch<float> row = make_scratch<float>(values.size());
    std::copy(values.begin(), values.end(), row.get());
    set->narrow(row.get(), count);
    for (i64 x = 0; x < count; ++x)
      ASSERT_TRUE(same_or_both_nan(narrowed(row, x), rounded(values[place(x)])))
          << set->name << " " << values[place(x)];
  }
}

TEST(TileKernelsBf16, weights_round_to_bf16_and_their_sum_does_not) {
  for (const Set* set : bf16_kernels())
    for (const bool far : {false, true}) {
      const i64 count = 40 * set->columns;
      const Units<float> units = fused_units<float>(0.3);
      const float maximum = far ? 1e9f : 5.f;
      Reference<float> reference;
      reference.maximum = maximum;
      (far ? reference.base : reference.subtrahend) = far ? maximum : maximum * units.c;
      const double deepest = 124 / double{units.c};
      Scratch<float> s = make_scratch<float>(place(count));
      for (i64 j = 0; j < count; ++j)
        s[place(j)] = maximum - static_cast<float>(deepest * 1.2 * static_cast<double>(j) / static_cast<double>(count));
      s[3] = -kInf<float>;
      const std::vector<float> given(s.get(), s.get() + count);
      const float sum = set->weights(s.get(), count, units, reference, {});
      double expected_sum = 0;
      for (i64 j = 0; j < count; ++j) {
        const double score = given[place(j)];
        const double exponent =
            far ? (score - double{maximum}) * double{units.c} : score * double{units.c} - double{reference.subtrahend};
        const double weight = std::exp2(exponent);
        if (exponent > -124) {
          ASSERT_NEAR(narrowed(s, j), weight, weight * (0x1p-8 + 0x1p-16)) << set->name << " exponent " << exponent;
        } else if (exponent < -127) {
          ASSERT_EQ(narrowed(s, j), 0) << set->name << " exponent " << exponent;
        }
        expected_sum += weight;
      }
      EXPECT_NEAR(sum, expected_sum, expected_sum * 0x1p-17) << set->name;
    }
}

TEST(TileKernelsBf16, weights_of_nothing_and_of_nan) {
  for (const Set* set : bf16_kernels()) {
    Scratch<float> s = make_scratch<float>(place(set->columns));
    std::fill_n(s.get(), set->columns, -kInf<float>);
    EXPECT_EQ(set->weights(s.get(), set->columns, natural_units<float>(), Reference<float>{}, {}), 0);
    for (i64 j = 0; j < set->columns; ++j) EXPECT_EQ(narrowed(s, j), 0);
    std::fill_n(s.get(), set->columns, 0.f);
    s[1] = kNaN<float>;
    EXPECT_TRUE(std::isnan(set->weights(s.get(), set->columns, natural_units<float>(), Reference<float>{}, {})));
    EXPECT_TRUE(std::isnan(narrowed(s, 1)));
    EXPECT_EQ(narrowed(s, 0), 1.f);
    EXPECT_EQ(narrowed(s, 2), 1.f);
  }
}

TEST(TileKernelsBf16, dropout_scales_what_it_keeps_after_the_sum) {
  for (const Set* set : bf16_kernels()) {
    const i64 columns = 3 * set->columns;
    std::vector<std::uint8_t> keep(place(columns / 8));
    for (std::size_t byte = 0; byte < keep.size(); ++byte) keep[byte] = static_cast<std::uint8_t>(0x35 + 91 * byte);
    Scratch<float> s = random_scratch<float>(columns, 4), plain = random_scratch<float>(columns, 4);
    const Reference<float> reference{3.f, 0.f, 3.f * natural_units<float>().c};
    EXPECT_EQ(set->weights(s.get(), columns, natural_units<float>(), reference, {keep.data(), 2.f}),
              set->weights(plain.get(), columns, natural_units<float>(), reference, {}));
    for (i64 j = 0; j < columns; ++j) {
      const bool kept = (keep[place(j / 8)] >> j % 8 & 1) != 0;
      ASSERT_EQ(narrowed(s, j), kept ? narrowed(plain, j) * 2 : 0) << set->name << " " << j;
    }
  }
}

TEST(TileKernelsBf16, one_infinity_or_nan_is_found_anywhere) {
  for (const Set* set : bf16_kernels()) {
    const i64 count = 2 * set->columns;
    Scratch<float> memory = poisoned(count);
    std::uint16_t* const values = reinterpret_cast<std::uint16_t*>(memory.get());
    std::fill_n(values, count, std::uint16_t{0x7f7f});
    EXPECT_TRUE(set->all_finite(packed(memory), count));
    for (i64 x = 0; x < count; ++x)
      for (const unsigned bad : {0x7f80u, 0xff80u, 0x7fc0u, 0xffffu, 0x7f81u}) {
        values[x] = static_cast<std::uint16_t>(bad);
        EXPECT_FALSE(set->all_finite(packed(memory), count)) << set->name << " " << x;
        values[x] = 0xff7f;
      }
  }
}

}  // namespace
}  // namespace narrows::cpu
