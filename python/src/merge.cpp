#include "merge.hpp"

namespace narrows::python {
namespace {

std::vector<Outputs> outputs(const Parts& parts) {
  std::vector<Outputs> pairs;
  for (std::size_t i = 0; i + 1 < parts.size(); i += 2) pairs.push_back({parts[i].tensor(), parts[i + 1].tensor()});
  return pairs;
}

Tensor tensor_or_none(const Operand* operand) { return operand ? operand->tensor() : Tensor{}; }

}  // namespace

void merge(const Parts& parts, const Parts& out, const Operand* sinks, std::uintptr_t stream) {
  const std::vector<Outputs> pairs = outputs(parts);
  const Outputs results = outputs(out).at(0);
  const nb::gil_scoped_release release;
  narrows::merge(pairs, results, tensor_or_none(sinks), reinterpret_cast<void*>(stream));
}

void merge_backward(const Parts& parts, const Operand& dout, const Operand* dlse, const Parts& gradients,
                    const Operand* sinks, const Operand* dsinks, std::uintptr_t stream) {
  const std::vector<Outputs> pairs = outputs(parts);
  const std::vector<Outputs> written = outputs(gradients);
  const nb::gil_scoped_release release;
  narrows::merge_backward(pairs, dout.tensor(), tensor_or_none(dlse), {written, tensor_or_none(dsinks)},
                          tensor_or_none(sinks), reinterpret_cast<void*>(stream));
}

}  // namespace narrows::python
