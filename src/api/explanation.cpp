#include "core/error.hpp"

#include <narrows/narrows.hpp>

#include <array>
#include <cmath>
#include <cstdio>

namespace narrows {
namespace {

/// 1234567 with "B" becomes "1.23 MB". Three significant digits, powers of 1000.
std::string scaled(double value, std::string_view unit) {
  constexpr std::array<std::string_view, 7> kPrefixes{"", "k", "M", "G", "T", "P", "E"};
  std::size_t prefix = 0;
  while (value >= 999.5 && prefix + 1 < kPrefixes.size()) {
    value /= 1000;
    ++prefix;
  }
  std::array<char, 32> digits{};
  std::snprintf(digits.data(), digits.size(), "%.3g", value);
  return text(digits.data(), " ", kPrefixes[prefix], unit);
}

std::string milliseconds(double seconds) {
  std::array<char, 32> digits{};
  std::snprintf(digits.data(), digits.size(), "%.3g", seconds * 1e3);
  return text(digits.data(), " ms");
}

std::string column(std::string value, std::size_t width) {
  value.resize(std::max(width, value.size()), ' ');
  return value;
}

}  // namespace

std::string Explanation::text() const {
  const auto row = [](std::string_view label, const std::string& fused, const std::string& three_kernel) {
    return column(std::string(label), 14) + column(fused, 14) + three_kernel + "\n";
  };
  std::string lines = problem + "\n" + row("", "fused", "three kernels");
  lines += row("memory moved", scaled(static_cast<double>(fused_bytes), "B"),
               scaled(static_cast<double>(three_kernel_bytes), "B"));
  lines += row("extra memory", scaled(static_cast<double>(fused_memory), "B"),
               scaled(static_cast<double>(three_kernel_memory), "B"));
  lines += row("intensity", scaled(fused_intensity, "FLOP/B"), scaled(three_kernel_intensity, "FLOP/B"));
  lines += row("predicted", milliseconds(predicted_seconds), milliseconds(three_kernel_seconds));
  lines += narrows::text("work          ", scaled(flops, "FLOP"), " over ", visible_pairs,
                         " visible (query, key, head) triples; limited by ", limited_by, "\n");
  lines += plan;
  for (const std::string& reason : refused) lines += narrows::text("refused ", reason, "\n");
  return lines;
}

}  // namespace narrows
