#include "cpu/reference_numbers.hpp"

#include <gtest/gtest.h>

#include "cpu/reference_philox.hpp"
#include "tests/support/tensors.hpp"

namespace narrows::test {
namespace {

TEST(ReferenceNumbers, fp16_rounds_to_nearest_even) {
  EXPECT_EQ(fp16_bits(1), 0x3C00);
  EXPECT_EQ(fp16_bits(-2), 0xC000);
  EXPECT_EQ(fp16_bits(1 + 0x1p-11), 0x3C00);            // a tie goes to the even neighbour below
  EXPECT_EQ(fp16_bits(1 + 3 * 0x1p-11), 0x3C02);        // and above
  EXPECT_EQ(fp16_bits(1 + 0x1p-11 + 0x1p-40), 0x3C01);  // by way of fp32 it would have become a tie
  EXPECT_EQ(fp16_bits(65504), 0x7BFF);
  EXPECT_EQ(fp16_bits(65519.99), 0x7BFF);
  EXPECT_EQ(fp16_bits(65520), 0x7C00);
  EXPECT_EQ(fp16_bits(-1e300), 0xFC00);
  EXPECT_EQ(fp16_bits(0x1p-24), 0x0001);
  EXPECT_EQ(fp16_bits(0x1p-25), 0x0000);
  EXPECT_EQ(fp16_bits(0x1.001p-25), 0x0001);
  EXPECT_EQ(fp16_bits(0x1p-14 - 0x1p-26), 0x0400);  // the largest subnormal and a half rounds to the smallest normal
  EXPECT_EQ(fp16_bits(-0.0), 0x8000);
}

TEST(ReferenceNumbers, bf16_rounds_to_nearest_even) {
  EXPECT_EQ(bf16_bits(1), 0x3F80);
  EXPECT_EQ(bf16_bits(133120), 0x4802);
  EXPECT_EQ(bf16_bits(1 + 0x1p-8), 0x3F80);
  EXPECT_EQ(bf16_bits(1 + 3 * 0x1p-8), 0x3F82);
  EXPECT_EQ(bf16_bits(1 + 0x1p-8 + 0x1p-50), 0x3F81);
  EXPECT_EQ(bf16_bits(0x1.FEp127), 0x7F7F);
  EXPECT_EQ(bf16_bits(0x1.FFp127), 0x7F80);
  EXPECT_EQ(bf16_bits(0x1p-133), 0x0001);
  EXPECT_EQ(bf16_bits(0x1p-134), 0x0000);
  EXPECT_EQ(bf16_bits(1e-300), 0x0000);
}

TEST(ReferenceNumbers, every_16_bit_pattern_survives) {
  for (int bits = 0; bits < 65536; ++bits) {
    const std::uint16_t pattern = static_cast<std::uint16_t>(bits);
    for (const int mantissa : {10, 7}) {
      const double value = mantissa == 10 ? from_fp16(pattern) : from_bf16(pattern);
      const bool special = (bits >> mantissa & ((1 << (15 - mantissa)) - 1)) == (1 << (15 - mantissa)) - 1;
      const bool nan = special && (bits & ((1 << mantissa) - 1)) != 0;
      ASSERT_EQ(std::isnan(value), nan) << bits;
      if (nan) continue;
      ASSERT_EQ(mantissa == 10 ? fp16_bits(value) : bf16_bits(value), pattern);
    }
    float wide = 0;
    const std::uint32_t wide_bits = static_cast<std::uint32_t>(bits) << 16;
    std::memcpy(&wide, &wide_bits, sizeof wide);
    if (!std::isnan(wide)) {
      ASSERT_EQ(from_bf16(pattern), static_cast<double>(wide));
    }
  }
  EXPECT_EQ(from_fp16(0x3555), 0.333251953125);
  EXPECT_EQ(from_fp16(0x03FF), 1023 * 0x1p-24);
}

TEST(ReferenceNumbers, NaN_stays_NaN) {
  EXPECT_TRUE(std::isnan(from_fp16(fp16_bits(std::nan("")))));
  EXPECT_TRUE(std::isnan(from_bf16(bf16_bits(std::nan("")))));
}

TEST(ReferenceNumbers, views_follow_strides_and_broadcast_from_the_right) {
  Array permuted(DType::bf16, {2, 3, 4}, {{1, 2, 0}, 5});
  permuted.fill([](const Dims& at) { return static_cast<double>(100 * at[0] + 10 * at[1] + at[2]); });
  EXPECT_EQ((permuted[{1, 2, 3}]), 123);
  EXPECT_EQ(permuted.tensor().strides, (Dims{1, 4 * 7, 7}));
  EXPECT_TRUE(permuted.gaps_intact());

  const Array row(DType::fp32, {3, 1}, {1, 2, 3});
  const reference::View wide = reference::broadcast(row);
  EXPECT_EQ(wide.at(5, 6, 2, 7), 3);
}

TEST(ReferenceNumbers, split_runs_every_task_once) {
  std::vector<int> runs(1000);
  reference::split(1000, 4, [&](std::int64_t task) { ++runs[static_cast<std::size_t>(task)]; });
  EXPECT_EQ(runs, std::vector<int>(1000, 1));
  reference::split(0, 4, [&](std::int64_t) { FAIL(); });
}

using Words = std::array<std::uint32_t, 4>;

// Known answers from tests/kat_vectors of the Random123 distribution (D. E. Shaw Research), lines "philox4x32 10".
TEST(ReferencePhilox, known_answers_of_Random123) {
  EXPECT_EQ(reference::philox4x32_10({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const std::uint32_t ones = 0xffffffff;
  EXPECT_EQ(reference::philox4x32_10({ones, ones, ones, ones}, {ones, ones}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(reference::philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

Options dropout(double p, std::uint64_t seed, std::uint64_t offset, const Origin& origin = {}) {
  Options options;
  options.dropout = p;
  options.seed = seed;
  options.offset = offset;
  options.origin = origin;
  return options;
}

// Halves of the first known answer in key order: e8d5 6627 c58d e169 ac4c bc57 dbd8 9b00; p = 1/4 keeps those below c000.
TEST(ReferencePhilox, dropout_takes_low_halves_first) {
  const reference::Dropout quarter(dropout(0.25, 0, 0), 1);
  const std::vector<bool> kept{false, true, false, false, true, true, false, true};
  for (std::size_t j = 0; j < kept.size(); ++j)
    EXPECT_EQ(quarter.factor(0, 0, 0, static_cast<std::int64_t>(j)), kept[j] ? 65536.0 / 49152 : 0) << j;
}

// The third known answer, reached through seed, offset, positions and origin; its words are d16cfe09 94fdcceb ...
TEST(ReferencePhilox, dropout_counts_by_global_position) {
  const std::int64_t heads = 0x1000;
  const Origin origin{0x13198, 0xa00, 0x85a30000, 0x243f6a88LL * 8 - 16, heads};
  const reference::Dropout half(dropout(0.5, 0x299f31d0a4093822, 0x03707344, origin), 4);
  const std::vector<std::uint32_t> halves{0xfe09, 0xd16c, 0xcceb, 0x94fd, 0xe420, 0x5001, 0x6ea1, 0x2412};
  for (std::size_t j = 0; j < halves.size(); ++j)
    EXPECT_EQ(half.factor(0, 0x2e, 0x08d3, 16 + static_cast<std::int64_t>(j)), halves[j] < 0x8000 ? 2 : 0) << j;
}

TEST(ReferencePhilox, seed_and_offset_may_be_tensors) {
  Array seed(DType::int64, {1}), offset(DType::int64, {1});
  seed.fill(7);
  offset.fill(9);
  Options read = dropout(0.5, 0, 0);
  read.seed = Number(seed.tensor());
  read.offset = Number(offset.tensor());
  const reference::Dropout from_tensors(read, 3), from_values(dropout(0.5, 7, 9), 3);
  int kept = 0;
  for (std::int64_t j = 0; j < 64; ++j) {
    EXPECT_EQ(from_tensors.factor(1, 2, 3, j), from_values.factor(1, 2, 3, j));
    kept += from_values.factor(1, 2, 3, j) > 0;
  }
  EXPECT_GT(kept, 16);
  EXPECT_LT(kept, 48);
}

TEST(ReferencePhilox, without_dropout_nothing_is_scaled) {
  EXPECT_EQ(reference::Dropout(dropout(0, 1, 2), 1).factor(0, 0, 0, 0), 1);
}

}  // namespace
}  // namespace narrows::test
