#include "api/machine.hpp"

#include "cpu/machine.hpp"
#include "cuda/machine.hpp"

namespace narrows {

Machine machine_of(const Device& device) {
  return device.kind == DeviceKind::cuda ? cuda::machine(device) : cpu::machine();
}

}  // namespace narrows
