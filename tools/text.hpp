// Numbers in and out of text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <narrows/narrows.hpp>

namespace narrows::cli {

/// Decimal, all of `text`; otherwise Error (invalid_value) in the name of `option`.
std::int64_t parse_integer(std::string_view option, std::string_view text);
std::int64_t parse_integer(std::string_view option, std::string_view text, std::int64_t least, std::int64_t most);
std::uint64_t parse_unsigned(std::string_view option, std::string_view text);
double parse_real(std::string_view option, std::string_view text);
/// Separated by commas.
std::vector<std::string_view> split(std::string_view text);
std::vector<std::int32_t> parse_int32s(std::string_view option, std::string_view text);
std::vector<float> parse_floats(std::string_view option, std::string_view text);
/// fp16, bf16, fp32 or fp64.
DType parse_dtype(std::string_view option, std::string_view text);

std::string with_prefix(double value, std::string_view unit);  // "1.23 MB": three digits, powers of 1000
std::string duration(double seconds);                          // "1.23 ms"
std::string joined(const std::vector<std::string>& parts, std::string_view separator = ", ");

}  // namespace narrows::cli
