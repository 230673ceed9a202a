// Every instruction set that this machine can execute, against plain loops.
#include <gtest/gtest.h>

#include "tests/cpu/tile_run.hpp"
#include "tests/support/instruction_sets.hpp"

#include <algorithm>
#include <type_traits>

namespace narrows::cpu {

extern const InstructionSet kTileKernelsWide;

namespace {

template <class T> class TileKernelsTest : public testing::Test {};
using ComputeTypes = testing::Types<float, double>;
TYPED_TEST_SUITE(TileKernelsTest, ComputeTypes);

/// All that can run here, tile_kernels_wide.cpp and, for float, the emulated sets.
template <class T> std::vector<const TileKernels<T>*> tested_kernels() {
  const auto available = available_tile_kernels<T>();
  std::vector<const TileKernels<T>*> kernels(available.begin(), available.end());
  if constexpr (std::is_same_v<T, float>) {
    kernels.push_back(&kTileKernelsWide.single);
    for (const test::EmulatedSet& emulated : test::emulated_sets()) kernels.push_back(&emulated.set.single);
  }
  if constexpr (std::is_same_v<T, double>) kernels.push_back(&kTileKernelsWide.twice);
  return kernels;
}

/// Those that multiply what they add up in: tile_kernels_bf16_test.cpp has the others.
template <class T> std::vector<const TileKernels<T>*> full_kernels() {
  std::vector<const TileKernels<T>*> kernels = tested_kernels<T>();
  std::erase_if(kernels, [](const auto* set) { return item_size(set->operand) != sizeof(T); });
  return kernels;
}

TYPED_TEST(TileKernelsTest, the_list_ends_with_the_portable_one) {
  const auto kernels = available_tile_kernels<TypeParam>();
  ASSERT_FALSE(kernels.empty());
  EXPECT_STREQ(kernels.back()->name, "portable");
  for (const auto* set : kernels) {
    EXPECT_GE(set->rows, 1);
    EXPECT_EQ(set->columns % 4, 0);
  }
}

TYPED_TEST(TileKernelsTest, packing_transposes_converts_and_pads_with_zeros) {
  using T = TypeParam;
  for (const auto* set : full_kernels<T>())
    for (const DType dtype : storage_types<T>())
      for (const i64 stride : {1, 3, 0, -1, -2})
        for (const i64 length : {1, 5, 16, 33, 64, 70}) {
          const i64 columns = set->columns, width = (length + columns - 1) / columns * columns;
          SCOPED_TRACE(std::string(set->name) + " stride " + std::to_string(stride) + " length " +
                       std::to_string(length));
          for (const i64 count : {i64{1}, i64{2}, columns, columns + 3}) {
            const Source source(dtype, count, length, stride);
            const i64 keys = (count + columns - 1) / columns * columns;
            Scratch<T> room = random_scratch<T>(std::max<i64>(keys, set->rows) * std::max(length, width) + 64, 1);
            set->pack_keys(source.rows, packed(room));
            for (i64 j = 0; j < keys; ++j)
              for (i64 x = 0; x < length; ++x)
                ASSERT_EQ(room[static_cast<std::size_t>((j / columns * length + x) * columns + j % columns)],
                          source.at(j, x));
            set->pack_values(source.rows, packed(room));
            for (i64 j = 0; j < keys; ++j)
              for (i64 x = 0; x < width; ++x)
                ASSERT_EQ(room[static_cast<std::size_t>((x / columns * keys + j) * columns + x % columns)],
                          source.at(j, x));
            if (count > set->rows) continue;
            set->pack_query(source.rows, T{-1}, packed(room));
            for (i64 r = 0; r < set->rows; ++r)
              for (i64 x = 0; x < length; ++x)
                ASSERT_EQ(room[static_cast<std::size_t>(x * set->rows + r)], -source.at(r, x));
          }
        }
}

TEST(TileKernels, every_16_bit_number_is_read_and_written_exactly) {
  std::vector<std::uint16_t> bits(65536), back(65536);
  for (std::size_t x = 0; x < bits.size(); ++x) bits[x] = static_cast<std::uint16_t>(x);
  std::vector<float> values(65536);
  for (const auto* set : tested_kernels<float>())
    for (const DType dtype : {DType::fp16, DType::bf16}) {
      set->convert(reinterpret_cast<const std::byte*>(bits.data()), 2, dtype, 65536, values.data());
      set->store(values.data(), 1.f, 65536, reinterpret_cast<std::byte*>(back.data()), 2, dtype);
      for (std::size_t x = 0; x < bits.size(); ++x) {
        float alone = 0;
        set->convert(reinterpret_cast<const std::byte*>(&bits[x]), 0, dtype, 1, &alone);
        const double expected = reference::load(bits.data(), dtype, static_cast<i64>(x));
        ASSERT_TRUE(same_or_both_nan(values[x], expected)) << set->name << " " << x;
        ASSERT_TRUE(same_or_both_nan(alone, expected)) << set->name << " " << x;
        ASSERT_TRUE(same_or_both_nan(reference::load(back.data(), dtype, static_cast<i64>(x)), expected))
            << set->name << " " << x;
        ASSERT_FALSE(expected == 0 && back[x] != 0) << "a zero is stored as +0";
      }
    }
}

TEST(TileKernels, stores_round_to_nearest_even) {
  std::vector<float> values{0.f,     65519.f,  65520.f,  65536.f, -65520.f, 3.4e38f, kInf<float>, -kInf<float>,
                            5.9e-8f, 2.98e-8f, 2.99e-8f, 8.9e-8f, 6.1e-5f,  1e-40f,  kNaN<float>};
  for (std::uint32_t step = 0; step < 200000; ++step) {
    const std::uint32_t pattern = step * 21481u;
    float value;
    std::memcpy(&value, &pattern, 4);
    values.push_back(value);
  }
  for (float tie = 1.f; tie < 2.f; tie += 1.f / 4096) values.push_back(tie);
  const i64 count = static_cast<i64>(values.size());
  for (const auto* set : tested_kernels<float>())
    for (const DType dtype : {DType::fp16, DType::bf16})
      for (const i64 stride : {1, 2}) {
        std::vector<std::uint16_t> out(values.size() * 2);
        set->store(values.data(), 1.f, count, reinterpret_cast<std::byte*>(out.data()), 2 * stride, dtype);
        for (i64 x = 0; x < count; ++x) {
          std::uint16_t expected;
          reference::store(&expected, dtype, 0, double{values[static_cast<std::size_t>(x)]});
          ASSERT_TRUE(
              same_or_both_nan(reference::load(out.data(), dtype, x * stride), reference::load(&expected, dtype, 0)))
              << set->name << " " << values[static_cast<std::size_t>(x)];
        }
      }
}

TYPED_TEST(TileKernelsTest, stores_multiply_and_touch_nothing_else) {
  using T = TypeParam;
  for (const auto* set : tested_kernels<T>())
    for (const i64 count : {1, 7, 64, 65, 200})
      for (const i64 stride : {1, 3}) {
        const Scratch<T> row = random_scratch<T>(count, 3);
        std::vector<T> out(static_cast<std::size_t>(count * stride + 4), T{99});
        set->store(row.get(), T{3}, count, reinterpret_cast<std::byte*>(out.data()),
                   stride * static_cast<i64>(sizeof(T)), sizeof(T) == 4 ? DType::fp32 : DType::fp64);
        for (i64 x = 0; x < count * stride + 4; ++x) {
          const bool ours = x % stride == 0 && x / stride < count;
          ASSERT_EQ(out[static_cast<std::size_t>(x)], ours ? row[static_cast<std::size_t>(x / stride)] * T{3} : T{99});
        }
      }
}

TYPED_TEST(TileKernelsTest, scores_are_dot_products_and_their_bits_do_not_depend_on_the_panel) {
  using T = TypeParam;
  for (const auto* set : full_kernels<T>())
    for (const i64 d : {1, 3, 64, 131}) {
      const i64 rows = set->rows, columns = set->columns, keys = 3 * columns, ld = keys + 16;
      const Scratch<T> panel = random_scratch<T>(rows * d, 1), strips = random_scratch<T>(keys * d, 2);
      const Scratch<T> whole = random_scratch<T>(rows * ld, 3);
      set->scores(packed(panel), set->rows, packed(strips), 3, d, whole.get(), ld);
      for (i64 r = 0; r < rows; ++r)
        for (i64 j = 0; j < keys; ++j) {
          double sum = 0, size = 0;
          for (i64 x = 0; x < d; ++x) {
            const double product =
                double{panel[static_cast<std::size_t>(x * rows + r)]} *
                double{strips[static_cast<std::size_t>((j / columns * d + x) * columns + j % columns)]};
            sum += product;
            size += std::abs(product);
          }
          ASSERT_NEAR(whole[static_cast<std::size_t>(r * ld + j)], sum,
                      size * kEpsilon<T> * static_cast<double>(d + 1));
        }
      for (int count = 1; count < set->rows; ++count) {
        const Scratch<T> part = random_scratch<T>(rows * ld, 3);
        set->scores(packed(panel), count, packed(strips), 3, d, part.get(), ld);
        const Scratch<T> untouched = random_scratch<T>(rows * ld, 3);
        for (i64 r = 0; r < rows; ++r)
          for (i64 j = 0; j < keys; ++j)
            ASSERT_EQ(part[static_cast<std::size_t>(r * ld + j)],
                      (r < count ? whole : untouched)[static_cast<std::size_t>(r * ld + j)]);
      }
    }
}

TYPED_TEST(TileKernelsTest, accumulate_adds_weighted_values_for_every_width) {
  using T = TypeParam;
  for (const auto* set : full_kernels<T>()) {
    const i64 rows = set->rows, columns = set->columns, keys = 2 * columns, ld = keys + 16;
    for (const i64 dv : {i64{1}, columns / 2, columns / 2 + 1, columns, columns + 1, 3 * columns}) {
      const i64 width = (dv + columns - 1) / columns * columns;
      const Scratch<T> p = random_scratch<T>(rows * ld, 1), v = random_scratch<T>(keys * width, 2);
      const Scratch<T> before = random_scratch<T>(rows * width, 3);
      for (int count = 1; count <= set->rows; ++count) {
        const Scratch<T> o = random_scratch<T>(rows * width, 3);
        set->accumulate(p.get(), ld, count, packed(v), keys * columns, keys, dv, o.get(), width);
        for (i64 r = 0; r < rows; ++r)
          for (i64 x = 0; x < dv; ++x) {
            double sum = before[static_cast<std::size_t>(r * width + x)], size = std::abs(sum);
            for (i64 j = 0; r < count && j < keys; ++j) {
              const double product =
                  double{p[static_cast<std::size_t>(r * ld + j)]} *
                  double{v[static_cast<std::size_t>((x / columns * keys + j) * columns + x % columns)]};
              sum += product;
              size += std::abs(product);
            }
            ASSERT_NEAR(o[static_cast<std::size_t>(r * width + x)], sum, size * kEpsilon<T> * 40)
                << set->name << " dv " << dv;
          }
      }
    }
  }
}

TYPED_TEST(TileKernelsTest, weights_are_powers_of_two_near_and_far) {
  using T = TypeParam;
  const double smallest = sizeof(T) == 4 ? -126 : -1022;
  for (const auto* set : full_kernels<T>())
    for (const bool far : {false, true}) {
      const i64 count = 40 * set->columns;
      Scratch<T> s = make_scratch<T>(static_cast<std::size_t>(count));
      const Units<T> units = fused_units<T>(0.3);
      const T maximum = far ? T{1e9} : T{5};
      Reference<T> reference;
      reference.maximum = maximum;
      (far ? reference.base : reference.subtrahend) = far ? maximum : maximum * units.c;
      const double deepest = -smallest / double{units.c};
      for (i64 j = 0; j < count; ++j)
        s[static_cast<std::size_t>(j)] =
            maximum - static_cast<T>(deepest * 1.2 * static_cast<double>(j) / static_cast<double>(count));
      s[3] = -kInf<T>;
      std::vector<T> given(s.get(), s.get() + count);
      const T sum = set->weights(s.get(), count, units, reference, {});
      double expected_sum = 0;
      for (i64 j = 0; j < count; ++j) {
        const double score = given[static_cast<std::size_t>(j)];
        const double exponent =
            far ? (score - double{maximum}) * double{units.c} : score * double{units.c} - double{reference.subtrahend};
        const double weight = s[static_cast<std::size_t>(j)];
        if (exponent < smallest - 0.01) {
          ASSERT_EQ(weight, 0) << set->name << " exponent " << exponent;
        } else if (exponent > smallest + 0.01) {
          // One ulp of the function and the rounding of its argument.
          const double tolerance = std::exp2(exponent) * kEpsilon<T> * (1.5 + std::abs(exponent));
          ASSERT_NEAR(weight, std::exp2(exponent), tolerance) << set->name << " exponent " << exponent;
        }
        expected_sum += weight;
      }
      EXPECT_NEAR(s[0], 1, far ? 0 : 8 * kEpsilon<T>);
      EXPECT_NEAR(sum, expected_sum, expected_sum * kEpsilon<T> * 8);
    }
}

TYPED_TEST(TileKernelsTest, weights_of_nothing_and_of_nan) {
  using T = TypeParam;
  for (const auto* set : full_kernels<T>()) {
    Scratch<T> s = make_scratch<T>(static_cast<std::size_t>(set->columns));
    std::fill_n(s.get(), set->columns, -kInf<T>);
    EXPECT_EQ(set->weights(s.get(), set->columns, natural_units<T>(), Reference<T>{}, {}), T{0});
    for (int j = 0; j < set->columns; ++j) EXPECT_EQ(s[static_cast<std::size_t>(j)], T{0});
    s[1] = kNaN<T>;
    EXPECT_TRUE(std::isnan(set->weights(s.get(), set->columns, natural_units<T>(), Reference<T>{}, {})));
    EXPECT_TRUE(std::isnan(s[1]));
    EXPECT_EQ(s[0], T{1});
  }
}

TYPED_TEST(TileKernelsTest, dropout_scales_what_it_keeps_after_the_sum) {
  using T = TypeParam;
  const DropoutRule rule{.seed = 77, .offset = 3, .threshold = keep_threshold(0.4), .origin_key = 5, .heads = 9};
  for (const auto* set : full_kernels<T>())
    for (const i64 first_key : {i64{0}, i64{3}, i64{64}, (i64{1} << 35) - 40}) {
      const i64 columns = 3 * set->columns;
      const i64 bytes = ceil_div<i64>(columns, 8);
      std::vector<std::uint8_t> keep(static_cast<std::size_t>(bytes + 1), 0xa5);
      set->keep_bits(rule, 1, 2, 3, first_key, bytes, keep.data());
      EXPECT_EQ(keep.back(), 0xa5) << "one byte too many";
      Scratch<T> s = random_scratch<T>(columns, 4), plain = random_scratch<T>(columns, 4);
      Scratch<T> dp = random_scratch<T>(columns, 5), plain_dp = random_scratch<T>(columns, 5);
      const Reference<T> reference{T{3}, T{0}, T{3} * natural_units<T>().c};
      const Dropout<T> dropout{keep.data(), T{2}};
      EXPECT_EQ(set->weights(s.get(), columns, natural_units<T>(), reference, dropout),
                set->weights(plain.get(), columns, natural_units<T>(), reference, {}));
      for (i64 j = 0; j < columns; ++j) {
        const std::size_t at = static_cast<std::size_t>(j);
        ASSERT_EQ((keep[at / 8] >> j % 8 & 1) != 0, kept(rule, 1, 2, 3, first_key + j)) << set->name << " " << j;
        ASSERT_EQ(s[at], kept(rule, 1, 2, 3, first_key + j) ? plain[at] * T{2} : T{0}) << set->name << " " << j;
      }
      Scratch<T> p = random_scratch<T>(columns, 6), plain_p = random_scratch<T>(columns, 6);
      const BackwardReference<T> lse{T{1}, T{0}, T{1}, T{3}};
      set->gradients(p.get(), dp.get(), columns, lse, T{0.25}, dropout);
      set->gradients(plain_p.get(), nullptr, columns, lse, T{0.25}, {});
      for (i64 j = 0; j < columns; ++j) {
        const std::size_t at = static_cast<std::size_t>(j);
        const T factor = kept(rule, 1, 2, 3, first_key + j) ? T{2} : T{0};
        ASSERT_EQ(p[at], plain_p[at] * factor) << set->name << " " << j;
        ASSERT_EQ(dp[at], plain_p[at] * (plain_dp[at] * factor - T{0.25})) << set->name << " " << j;
      }
    }
}

TYPED_TEST(TileKernelsTest, hide_selects_minus_infinity_at_any_place) {
  using T = TypeParam;
  for (const auto* set : tested_kernels<T>())
    for (const i64 first : {0, 1, 3})
      for (const i64 count : {0, 1, 7, 40}) {
        Scratch<T> s = random_scratch<T>(64, 4);
        const Scratch<T> before = random_scratch<T>(64, 4);
        std::vector<std::byte> allowed(64);
        for (std::size_t j = 0; j < 64; ++j) allowed[j] = std::byte(j % 3 == 0 ? 0 : j % 3 == 1 ? 1 : 0x80);
        s[2] = kNaN<T>;
        set->hide(s.get() + first, count, allowed.data());
        for (i64 j = 0; j < 64; ++j) {
          const bool hidden = j >= first && j < first + count && (j - first) % 3 == 0;
          const T expected = hidden ? -kInf<T> : j == 2 ? kNaN<T> : before[static_cast<std::size_t>(j)];
          ASSERT_TRUE(same_or_both_nan(s[static_cast<std::size_t>(j)], expected)) << set->name << " " << j;
        }
      }
}

TYPED_TEST(TileKernelsTest, maximum_ignores_nan_and_finds_every_place) {
  using T = TypeParam;
  for (const auto* set : tested_kernels<T>()) {
    const i64 count = 3 * set->columns;
    Scratch<T> s = make_scratch<T>(static_cast<std::size_t>(count));
    for (i64 place = 0; place < count; ++place) {
      std::fill_n(s.get(), count, T{-7});
      s[static_cast<std::size_t>((place + 1) % count)] = kNaN<T>;
      s[static_cast<std::size_t>(place)] = T{-3};
      EXPECT_EQ(set->maximum(s.get(), count), T{-3}) << set->name << " " << place;
    }
    std::fill_n(s.get(), count, kNaN<T>);
    EXPECT_EQ(set->maximum(s.get(), count), -kInf<T>);
  }
}

TYPED_TEST(TileKernelsTest, logits_apply_scale_cap_distance_and_bias) {
  using T = TypeParam;
  for (const auto* set : tested_kernels<T>())
    for (const double cap : {0.0, 2.0, 50.0})
      for (const double slope : {0.0, 0.25}) {
        const i64 count = 8 * set->columns;
        const T position = static_cast<T>(count / 2);
        Scratch<T> s = random_scratch<T>(count, 4), bias = random_scratch<T>(count, 5);
        for (i64 j = 0; j < count; ++j) s[static_cast<std::size_t>(j)] *= std::exp2(static_cast<T>(j % 30 - 15));
        const std::vector<T> given(s.get(), s.get() + count);
        const ScoreRules<T> rules = score_rules<T>(-1.5, cap, static_cast<T>(slope));
        bias[5] = -kInf<T>;
        s[5] = kNaN<T>;
        s[6] = kInf<T>;
        set->logits(s.get(), count, rules, position, bias.get());
        EXPECT_EQ(s[5], -kInf<T>) << "a bias of -inf selects, whatever the score";
        EXPECT_EQ(s[6], cap == 0 ? -kInf<T>
                                 : static_cast<T>(-cap - slope * std::abs(static_cast<double>(position) - 6) +
                                                  double{bias[6]}));
        for (i64 j = 7; j < count; ++j) {
          const double scaled = double{given[static_cast<std::size_t>(j)]} * -1.5;
          const double capped = cap == 0 ? scaled : cap * std::tanh(scaled / cap);
          const double added = -slope * std::abs(static_cast<double>(position) - static_cast<double>(j)) +
                               double{bias[static_cast<std::size_t>(j)]};
          ASSERT_NEAR(s[static_cast<std::size_t>(j)], capped + added,
                      4 * kEpsilon<T> * (std::abs(capped) + std::abs(added) + slope * 64))
              << set->name << " " << scaled;
        }
        set->logits(s.get(), set->columns, score_rules<T>(2, 0, T{0}), position, nullptr);
        EXPECT_EQ(s[5], -kInf<T>);
      }
}

TYPED_TEST(TileKernelsTest, one_infinity_or_nan_is_found_anywhere) {
  using T = TypeParam;
  for (const auto* set : full_kernels<T>()) {
    const i64 count = 2 * set->columns;
    Scratch<T> values = random_scratch<T>(count, 6);
    EXPECT_TRUE(set->all_finite(packed(values), count));
    for (i64 place = 0; place < count; ++place)
      for (const T bad : {kInf<T>, -kInf<T>, kNaN<T>}) {
        const T kept = std::exchange(values[static_cast<std::size_t>(place)], bad);
        EXPECT_FALSE(set->all_finite(packed(values), count));
        values[static_cast<std::size_t>(place)] = kept;
      }
  }
}

}  // namespace
}  // namespace narrows::cpu
