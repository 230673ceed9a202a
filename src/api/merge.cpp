// Joining attention over several sets of keys.
#include "cpu/merge.hpp"
#include "core/error.hpp"
#include "core/merge_call.hpp"
#include "cpu/machine.hpp"

#include <narrows/narrows.hpp>

namespace narrows {
namespace {

void require_cpu(const MergeCall& call) {
  if (call.device.kind != DeviceKind::cpu)
    throw Error(ErrorCode::not_implemented, text("no family merges this: cpu: the tensors are on ", call.device));
}

}  // namespace

void merge(std::span<const Outputs> parts, const Outputs& out, const Tensor& sinks) {
  const MergeCall call = make_merge(parts, out, sinks);
  require_cpu(call);
  cpu::run_merge(call, cpu::machine().threads);
}

void merge_backward(std::span<const Outputs> parts, const Tensor& dout, const Tensor& dlse, const MergeGradients& out,
                    const Tensor& sinks) {
  const MergeCall call = make_merge_backward(parts, dout, dlse, out, sinks);
  require_cpu(call);
  cpu::run_merge_backward(call, cpu::machine().threads);
}

}  // namespace narrows
