#include "tools/files/failure.hpp"

#include <algorithm>

#include <fmt/format.h>

namespace narrows::files {
namespace {

bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7F; }

}  // namespace

void fail(std::string_view subject, std::string_view text) {
  throw Error(ErrorCode::invalid_file, fmt::format("{}: {}", subject, text));
}

std::string printable(std::string_view text) {
  constexpr std::size_t kShown = 80;
  std::string result = "'";
  for (const char c : text.substr(0, kShown)) {
    if (is_control(c) || (static_cast<unsigned char>(c) & 0x80U) != 0)
      result += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    else
      result += c;
  }
  return result + (text.size() > kShown ? "...'" : "'");
}

std::string subject_of(std::string_view file, std::string_view kind, std::string_view name) {
  return fmt::format("{}: {} {}", file, kind, printable(name));
}

std::string text_of(const Dims& shape) {
  std::string result = "[";
  for (const std::int64_t size : shape) result += fmt::format("{}{}", result.size() > 1 ? ", " : "", size);
  return result + "]";
}

void require_name(std::string_view file, std::string_view kind, std::string_view name) {
  if (name.empty()) fail(file, fmt::format("{} without a name; a name has at least one character", kind));
  if (std::any_of(name.begin(), name.end(), is_control))
    fail(subject_of(file, kind, name), "the name holds a control character; names are printable text");
}

}  // namespace narrows::files
