// Joining attention over several sets of keys.
#include "cpu/merge.hpp"
#include "core/error.hpp"
#include "core/merge_call.hpp"
#include "cpu/machine.hpp"
#include "cuda/merge.hpp"

#include <narrows/narrows.hpp>

#include <new>

namespace narrows {
namespace {

void refuse_stream(const void* stream) {
  if (stream) refuse_value("stream", "given", "a call on the CPU has none", "null");
}

/// body(); its rows in work are std's memory, whose failure is told as every other.
template <class Body> void translated(Body body) {
  try {
    body();
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::out_of_memory, "merge: no memory for a row of each part");
  }
}

}  // namespace

void merge(std::span<const Outputs> parts, const Outputs& out, const Tensor& sinks, void* stream) {
  translated([&] {
    const MergeCall call = make_merge(parts, out, sinks);
    if (call.device.kind == DeviceKind::cuda) return cuda::run_merge(call, stream);
    refuse_stream(stream);
    cpu::run_merge(call, cpu::machine().threads);
  });
}

void merge_backward(std::span<const Outputs> parts, const Tensor& dout, const Tensor& dlse, const MergeGradients& out,
                    const Tensor& sinks, void* stream) {
  translated([&] {
    const MergeCall call = make_merge_backward(parts, dout, dlse, out, sinks);
    if (call.device.kind == DeviceKind::cuda) return cuda::run_merge_backward(call, stream);
    refuse_stream(stream);
    cpu::run_merge_backward(call, cpu::machine().threads);
  });
}

}  // namespace narrows
