#include "api/explained.hpp"
#include "api/machine.hpp"
#include "core/error.hpp"
#include "cpu/machine.hpp"
#include "cpu/peak.hpp"
#include "plan/plan.hpp"
#include "plan/traffic.hpp"

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

double intensity(double flops, std::int64_t bytes) { return bytes > 0 ? flops / static_cast<double>(bytes) : 0; }

}  // namespace

Explanation explained(const Call& call, std::string_view family) {
  const Work cost = work(call);
  const Device& device = call.problem.device;
  const Machine machine = device.kind == DeviceKind::cuda ? machine_of(device) : cpu::measured(cpu::machine());
  Choice choice = choose(call.problem, cost, machine, family);
  const Prediction three_kernel = predict(cost.three_kernel_flops, cost.three_kernel_bytes,
                                          product_rate(machine, choice.plan.operand), machine.bytes_per_second);
  return {
      .problem = call.problem.text(),
      .family = std::string(choice.plan.family),
      .plan = choice.plan.text(),
      .refused = std::move(choice.refused),
      .visible_pairs = cost.pairs,
      .flops = cost.flops,
      .fused_bytes = cost.fused_bytes,
      .three_kernel_bytes = cost.three_kernel_bytes,
      .fused_memory = choice.plan.workspace_bytes(),
      .three_kernel_memory = cost.three_kernel_memory,
      .fused_intensity = intensity(cost.flops, cost.fused_bytes),
      .three_kernel_intensity = intensity(cost.three_kernel_flops, cost.three_kernel_bytes),
      .predicted_seconds = choice.plan.prediction.seconds,
      .three_kernel_seconds = three_kernel.seconds,
      .limited_by = std::string(choice.plan.prediction.limited_by),
      .fused_l2_bytes = l2_bytes(call, choice.plan),
  };
}

std::string Explanation::text() const {
  const auto row = [](std::string_view label, const std::string& fused, const std::string& three_kernel) {
    return column(std::string(label), 14) + column(fused, 14) + three_kernel + "\n";
  };
  std::string lines = problem + "\n" + row("", "fused", "three kernels");
  lines += row("memory moved", scaled(static_cast<double>(fused_bytes), "B"),
               scaled(static_cast<double>(three_kernel_bytes), "B"));
  if (fused_l2_bytes > 0) lines += row("through L2", scaled(static_cast<double>(fused_l2_bytes), "B"), "-");
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
