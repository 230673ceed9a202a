#include "cuda/machine.hpp"

#include "cuda/driver.hpp"

#include <array>

namespace narrows::cuda {
namespace {

/// What a multiprocessor's tensor cores do with 16-bit operands and fp32 sums, from NVIDIA's data sheets.
struct Rate {
  int compute_capability;  // from this one on
  double flops_per_clock;
};
constexpr std::array kRates{Rate{120, 1024}, Rate{100, 8192}, Rate{90, 4096}, Rate{86, 1024}, Rate{80, 2048}};

double flops_per_clock(int compute_capability) {
  for (const Rate& rate : kRates)
    if (compute_capability >= rate.compute_capability) return rate.flops_per_clock;
  return 0;
}

}  // namespace

Machine machine(const Device& device) {
  const DeviceFacts& facts = device_facts(device.index);
  Machine machine{.device = device, .name = facts.name, .instruction_sets = {}};
  machine.compute_capability = 10 * facts.major + facts.minor;
  machine.multiprocessors = facts.multiprocessors;
  machine.shared_bytes = facts.shared_bytes;
  machine.l2_bytes = facts.l2_bytes;
  machine.flops_per_second = flops_per_clock(machine.compute_capability) * facts.multiprocessors * facts.clock_hertz;
  machine.bytes_per_second = facts.bytes_per_second;
  return machine;
}

Presence presence() {
  const Driver& driver = find_driver();
  if (!driver.functions) return {0, driver.absence};
  std::string detail = text("CUDA ", version_text(driver.version));
  for (int index = 0; index < driver.devices; ++index) {
    const DeviceFacts& facts = device_facts(index);
    detail += text(", cuda:", index, " ", facts.name, " (", facts.major, ".", facts.minor, ")");
  }
  return {driver.devices, detail};
}

}  // namespace narrows::cuda
