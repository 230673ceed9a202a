#pragma once

#include <cstdint>
#include <vector>

#include "operand.hpp"

namespace narrows::python {

/// Pairs of (o, lse), end to end: o of the first part, its lse, o of the second, ...
using Parts = std::vector<Operand>;

/// narrows::merge without the GIL. `out`: one pair. `sinks` may be null. `stream`: a CUstream as a number.
void merge(const Parts& parts, const Parts& out, const Operand* sinks, std::uintptr_t stream);

/// narrows::merge_backward without the GIL. `gradients`: as many pairs as `parts`. `dlse`, `sinks`, `dsinks` may be null.
void merge_backward(const Parts& parts, const Operand& dout, const Operand* dlse, const Parts& gradients,
                    const Operand* sinks, const Operand* dsinks, std::uintptr_t stream);

}  // namespace narrows::python
