#include "cpu/machine.hpp"

#include "core/environment.hpp"
#include "cpu/tile_kernels.hpp"

#include <sched.h>
#include <algorithm>
#include <fstream>
#include <thread>

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

}  // namespace

Machine machine() {
  static const std::string name = model_name();
  static const Machine found{.device = {},
                             .name = name,
                             .instruction_set = available_tile_kernels<float>().front()->name,
                             .threads = usable_cores()};
  Machine machine = found;
  if (const int threads = environment::threads()) machine.threads = threads;
  return machine;
}

}  // namespace narrows::cpu
