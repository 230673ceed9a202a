// Where a call is computed.
#pragma once

#include "plan/machine.hpp"

namespace narrows {

/// The machine that owns the tensors' memory. Throws Error where there is none, saying why.
Machine machine_of(const Device& device);

}  // namespace narrows
