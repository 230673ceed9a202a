#include "tools/text.hpp"

#include <array>
#include <charconv>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "core/error.hpp"
#include "tools/files/failure.hpp"

namespace narrows::cli {
namespace {

template <class Integer>
Integer parse_whole(std::string_view option, std::string_view text, Integer least, Integer most) {
  Integer value{};
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = failure != std::errc::invalid_argument && end == text.data() + text.size();
  if (!whole || failure != std::errc{} || value < least || value > most) {
    const bool below = !text.empty() && (text[0] == '-' || (failure == std::errc{} && value < least));
    refuse_value(option, files::printable(text), fmt::format("must be a whole number from {} to {}", least, most),
                 whole ? std::to_string(below ? least : most) : "");
  }
  return value;
}

}  // namespace

std::int64_t parse_integer(std::string_view option, std::string_view text, std::int64_t least, std::int64_t most) {
  return parse_whole<std::int64_t>(option, text, least, most);
}

std::int64_t parse_integer(std::string_view option, std::string_view text) {
  using Limits = std::numeric_limits<std::int64_t>;
  return parse_integer(option, text, Limits::min(), Limits::max());
}

std::uint64_t parse_unsigned(std::string_view option, std::string_view text) {
  return parse_whole<std::uint64_t>(option, text, 0, std::numeric_limits<std::uint64_t>::max());
}

double parse_real(std::string_view option, std::string_view text) {
  double value = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure == std::errc::result_out_of_range)
    refuse_value(option, files::printable(text), "is beyond what a double holds");
  if (failure != std::errc{} || end != text.data() + text.size())
    refuse_value(option, files::printable(text), "must be a number");
  return value;
}

std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> parts;
  for (std::size_t comma = text.find(','); comma != std::string_view::npos; comma = text.find(',')) {
    parts.push_back(text.substr(0, comma));
    text.remove_prefix(comma + 1);
  }
  parts.push_back(text);
  return parts;
}

std::vector<std::int32_t> parse_int32s(std::string_view option, std::string_view text) {
  using Limits = std::numeric_limits<std::int32_t>;
  std::vector<std::int32_t> values;
  for (const std::string_view part : split(text))
    values.push_back(static_cast<std::int32_t>(parse_integer(option, part, Limits::min(), Limits::max())));
  return values;
}

std::vector<float> parse_floats(std::string_view option, std::string_view text) {
  std::vector<float> values;
  for (const std::string_view part : split(text)) values.push_back(static_cast<float>(parse_real(option, part)));
  return values;
}

DType parse_dtype(std::string_view option, std::string_view text) {
  for (const DType dtype : {DType::fp16, DType::bf16, DType::fp32, DType::fp64})
    if (text == name(dtype)) return dtype;
  refuse_value(option, files::printable(text), "must be fp16, bf16, fp32 or fp64");
}

std::string with_prefix(double value, std::string_view unit) {
  constexpr std::array<std::string_view, 7> kPrefixes{"", "k", "M", "G", "T", "P", "E"};
  std::size_t prefix = 0;
  while (std::abs(value) >= 999.5 && prefix + 1 < kPrefixes.size()) {
    value /= 1000;
    ++prefix;
  }
  return fmt::format("{:.3g} {}{}", value, kPrefixes[prefix], unit);
}

std::string duration(double seconds) {
  if (seconds >= 1) return fmt::format("{:.3g} s", seconds);
  return seconds >= 1e-3 ? fmt::format("{:.3g} ms", seconds * 1e3) : fmt::format("{:.3g} us", seconds * 1e6);
}

std::string joined(const std::vector<std::string>& parts, std::string_view separator) {
  return fmt::format("{}", fmt::join(parts, separator));
}

}  // namespace narrows::cli
