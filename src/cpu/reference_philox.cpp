#include "cpu/reference_philox.hpp"

#include <cmath>

namespace narrows::reference {
namespace {

std::uint64_t value_of(const Number& number) {
  return number.tensor.given() ? static_cast<std::uint64_t>(*static_cast<const std::int64_t*>(number.tensor.data))
                               : number.value;
}

std::uint32_t low_word(std::uint64_t value) { return static_cast<std::uint32_t>(value); }
std::uint32_t high_word(std::uint64_t value) { return static_cast<std::uint32_t>(value >> 32); }

}  // namespace

std::array<std::uint32_t, 4> philox4x32_10(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t even = std::uint64_t{0xD2511F53} * counter[0];
    const std::uint64_t odd = std::uint64_t{0xCD9E8D57} * counter[2];
    counter = {high_word(odd) ^ counter[1] ^ key[0], low_word(odd), high_word(even) ^ counter[3] ^ key[1],
               low_word(even)};
    key = {key[0] + 0x9E3779B9, key[1] + 0xBB67AE85};
  }
  return counter;
}

Dropout::Dropout(const Options& options, std::int64_t heads) : on_(options.dropout > 0), origin_(options.origin) {
  if (origin_.H == 0) origin_.H = heads;
  if (!on_) return;
  kept_ = static_cast<std::uint32_t>(std::floor(65536 * (1 - options.dropout) + 0.5));
  const std::uint64_t seed = value_of(options.seed);
  key_ = {low_word(seed), high_word(seed)};
  offset_ = low_word(value_of(options.offset));
}

double Dropout::factor(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
  if (!on_) return 1;
  const std::int64_t row = (b + origin_.b) * origin_.H + h + origin_.h;
  const std::int64_t query = i + origin_.i;
  const std::int64_t key = j + origin_.j;
  const std::array<std::uint32_t, 4> words =
      philox4x32_10({static_cast<std::uint32_t>(key / 8), static_cast<std::uint32_t>(query),
                     static_cast<std::uint32_t>(row), offset_},
                    key_);
  const std::uint32_t word = words[static_cast<std::size_t>(key % 8 / 2)];
  const std::uint32_t half = key % 2 == 0 ? word & 0xFFFF : word >> 16;
  return half < kept_ ? 65536.0 / kept_ : 0;
}

}  // namespace narrows::reference
