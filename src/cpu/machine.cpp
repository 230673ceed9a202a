#include "cpu/machine.hpp"

#include "core/environment.hpp"
#include "core/error.hpp"
#include "cpu/tile_kernels.hpp"

#include <sched.h>
#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

namespace narrows::cpu {
namespace {

std::string model_name() {
  std::ifstream lines("/proc/cpuinfo");
  for (std::string line; std::getline(lines, line);) {
    const std::size_t colon = line.find(": ");
    if (colon != std::string::npos && line.starts_with("model name")) return line.substr(colon + 2);
  }
  return "unknown CPU";
}

/// Cores that the process may run on: less than the machine has in a container or under taskset.
int usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(CPU_COUNT(&set), 1);
  return std::max(static_cast<int>(std::thread::hardware_concurrency()), 1);
}

std::vector<std::string_view> names_of_instruction_sets() {
  std::vector<std::string_view> names;
  for (const TileKernels<float>* kernels : available_tile_kernels<float>()) names.push_back(kernels->name);
  return names;
}

/// All of them, or the one that the environment forces.
std::span<const std::string_view> instruction_sets() {
  static const std::vector<std::string_view> all = names_of_instruction_sets();
  const std::string forced = environment::instruction_set();
  if (forced.empty()) return all;
  const auto found = std::find(all.begin(), all.end(), forced);
  if (found != all.end()) return std::span(all).subspan(static_cast<std::size_t>(found - all.begin()), 1);
  std::string names;
  for (const std::string_view name : all) names += text(names.empty() ? "" : ", ", name);
  refuse_value("NARROWS_FAMILY", text("cpu/", forced), text("the instruction sets of this CPU are ", names),
               text("cpu/", all.front()));
}

std::string word_of(const std::string& path) {
  std::string word;
  std::ifstream(path) >> word;
  return word;
}

}  // namespace

std::int64_t cache_bytes(int level) {
  for (int index = 0;; ++index) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
    const std::string found = word_of(folder + "level"), size = word_of(folder + "size");  // "3", "32768K"
    if (found.empty()) return 0;
    if (found != std::to_string(level) || word_of(folder + "type") == "Instruction" || size.empty()) continue;
    const std::int64_t unit = size.back() == 'K' ? 1 << 10 : size.back() == 'M' ? 1 << 20 : 1;
    return std::atoll(size.c_str()) * unit;
  }
}

Machine machine() {
  static const std::string name = model_name();
  static const int cores = usable_cores();
  Machine machine{.device = {}, .name = name, .instruction_sets = instruction_sets(), .threads = cores};
  if (const int threads = environment::threads()) machine.threads = threads;
  return machine;
}

}  // namespace narrows::cpu
