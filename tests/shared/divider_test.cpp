// Division by multiplication against division.
#include "shared/divider.h"

#include <gtest/gtest.h>

#include <initializer_list>
#include <random>

namespace narrows::test {
namespace {

void expect_divides(i32 x, i32 divisor) {
  const auto [quotient, rest] = divider(divisor).divide(x);
  ASSERT_EQ(quotient, x / divisor) << x << " / " << divisor;
  ASSERT_EQ(rest, x % divisor) << x << " % " << divisor;
}

constexpr i32 kMost = 0x7fffffff;

TEST(Divider, small_numbers) {
  for (i32 divisor = 1; divisor <= 300; ++divisor)
    for (i32 x = 0; x <= 1000; ++x) expect_divides(x, divisor);
}

TEST(Divider, beside_every_multiple_and_power_of_two) {
  std::mt19937 random(1);
  for (int i = 0; i < 200000; ++i) {
    const i32 divisor = static_cast<i32>(random() >> (2 + i % 30)) + 1;
    const i32 multiple = static_cast<i32>(random() >> 1) / divisor * divisor;
    for (const i32 x : {0, multiple, multiple == 0 ? 0 : multiple - 1, kMost / divisor * divisor - 1, kMost})
      expect_divides(x, divisor);
  }
  for (int bits = 0; bits < 31; ++bits)
    for (const i32 divisor :
         {i32{1} << bits, (i32{1} << bits) - (bits > 0), static_cast<i32>((u32{1} << bits) | 1u), kMost})
      for (const i32 x : {0, divisor - 1, divisor, kMost - 1, kMost}) expect_divides(x, divisor);
}

}  // namespace
}  // namespace narrows::test
