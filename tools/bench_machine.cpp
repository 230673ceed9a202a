#include "tools/bench_machine.hpp"

#include <chrono>
#include <ctime>
#include <string_view>
#include <vector>

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <narrows/narrows.hpp>

#include "cpu/machine.hpp"
#include "tools/text.hpp"

namespace narrows::cli {
namespace {

/// In units of 1024, as caches are sold.
std::string cache_text(std::string_view label, std::int64_t bytes) {
  constexpr std::int64_t kKiB = 1 << 10, kMiB = 1 << 20;
  if (bytes == 0) return fmt::format("{} unknown", label);
  if (bytes % kMiB == 0) return fmt::format("{} {} MiB", label, bytes / kMiB);
  return fmt::format("{} {} KiB", label, bytes / kKiB);
}

std::string peers_text(const Peers& peers) {
  std::vector<std::string> parts;
  for (const auto& [name, version] : peers.found()) parts.push_back(fmt::format("{} ({})", name, version));
  return parts.empty() ? "none" : joined(parts, ", ");
}

}  // namespace

std::string machine_text(const Peers& peers) {
  const Info machine = info();
  return fmt::format(
      "narrows {}, {:%Y-%m-%d}\ncpu: {}, {} {}; {}, {}, {}\ninstruction set: {}; family: cpu\npeers: {}\n",
      machine.version, fmt::gmtime(std::time(nullptr)), machine.cpu, machine.threads,
      machine.threads == 1 ? "core" : "cores", cache_text("L1d", cpu::cache_bytes(1)),
      cache_text("L2", cpu::cache_bytes(2)), cache_text("L3", cpu::cache_bytes(3)), machine.instruction_set,
      peers_text(peers));
}

}  // namespace narrows::cli
