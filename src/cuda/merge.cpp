#include "cuda/merge.hpp"

#include "core/error.hpp"
#include "cuda/call_args.hpp"
#include "cuda/kernel.hpp"
#include "plan/sm80_merge.hpp"
#include "shared/merge_args.h"

#include <algorithm>

namespace narrows::cuda {
namespace {

/// Beside forward's 0 and those of backward and decoding.
enum class MergeKernel : i32 { merge = 8, backward = 9 };
constexpr i64 kMostMergeBlocks = i64{1} << 16;  // they take every so many rows

ProgramKey key_of(MergeKernel kernel, Element element, MergeStep step = {}) {
  KeyBits bits;
  bits.add(0, 64);
  bits.add(static_cast<i32>(kernel), 4);
  bits.add(static_cast<i32>(element), 8);
  bits.add(static_cast<i32>(step), 2);
  return bits.key();
}

/// argument: what gives the dtype its name.
void require_merge(std::string_view argument, const MergeCall& call) {
  if (call.dtype == DType::fp64) refuse_type(argument, call.dtype, "fp64 is for the CPU", "fp32");
  if (call.parts.size() > kMostMerged)
    refuse_value("parts", text(call.parts.size(), " parts"), text("must be at most ", kMostMerged, " on a GPU"),
                 to_text(kMostMerged));
}

MergePart part_of(const PartViews& views) { return {tensor_arg(views.o), tensor_arg(views.lse)}; }

MergeArgs merge_args(const MergeCall& call) {
  MergeArgs args;
  std::transform(call.parts.begin(), call.parts.end(), args.parts, part_of);
  args.out = part_of(call.out);
  args.sinks = tensor_arg(call.sinks);
  args.count = static_cast<i32>(call.parts.size());
  args.value_dim = narrow(call.value_dim);
  args.batch = call.batch;
  args.rows = call.rows;
  args.heads = call.heads;
  return args;
}

MergeBackwardArgs backward_args(const MergeCall& call, const DeviceMemory& merged) {
  MergeBackwardArgs args;
  args.dout = tensor_arg(call.dout);
  args.dlse = tensor_arg(call.dlse);
  args.sinks = tensor_arg(call.sinks);
  args.dsinks = tensor_arg(call.dsinks);
  args.merged = static_cast<MergedRow*>(merged.data());
  args.count = static_cast<i32>(call.parts.size());
  args.value_dim = narrow(call.value_dim);
  args.batch = call.batch;
  args.rows = call.rows;
  args.heads = call.heads;
  return args;
}

/// A warp for each row or head, as far as there are blocks.
Grid grid_of(i64 warps) {
  const i64 blocks = std::min(ceil_div<i64>(warps, kMergeWarps), kMostMergeBlocks);
  return {static_cast<unsigned>(blocks), 32 * kMergeWarps, 0};
}

}  // namespace

void run_merge(const MergeCall& call, void* stream) {
  require_merge("o", call);
  const i64 rows = call.batch * call.rows * call.heads;
  const auto element = static_cast<Element>(call.dtype);
  const CurrentDevice current(call.device.index);
  if (rows == 0) return;
  const Kernel& merging = kernel(call.device.index, key_of(MergeKernel::merge, element), static_cast<Stream>(stream),
                                 [&] { return merge_program(element); });
  launch(merging, grid_of(rows), static_cast<Stream>(stream), merge_args(call));
}

void run_merge_backward(const MergeCall& call, void* stream_) {
  require_merge("dout", call);
  const auto stream = static_cast<Stream>(stream_);
  const auto element = static_cast<Element>(call.dtype);
  const i64 rows = call.batch * call.rows * call.heads;
  const CurrentDevice current(call.device.index);
  const auto step_of = [&](MergeStep step) -> const Kernel& {
    return kernel(call.device.index, key_of(MergeKernel::backward, element, step), stream,
                  [&] { return merge_backward_program(element, step); });
  };
  if (call.heads == 0 || (call.gradients.empty() && !call.dsinks)) return;
  // All are there before the first is launched.
  const Kernel& shares = step_of(MergeStep::rows);
  const Kernel* const gradients = call.gradients.empty() ? nullptr : &step_of(MergeStep::parts);
  const Kernel* const sinks = call.dsinks ? &step_of(MergeStep::sinks) : nullptr;
  const DeviceMemory merged(rows * static_cast<i64>(sizeof(MergedRow)), stream);
  MergeBackwardArgs args = backward_args(call, merged);
  std::transform(call.parts.begin(), call.parts.end(), args.parts, part_of);
  if (rows) launch(shares, grid_of(rows), stream, args);
  for (i32 first = 0; rows && gradients && first < static_cast<i32>(call.gradients.size()); first += kGradientsAt) {
    const auto some = [&](const std::vector<PartViews>& all, MergePart* to) {
      const auto from = all.begin() + first;
      std::transform(from, from + std::min<i64>(all.end() - from, kGradientsAt), to, part_of);
    };
    some(call.parts, args.parts);
    some(call.gradients, args.parts + kGradientsAt);
    args.count = std::min(static_cast<i32>(call.parts.size()) - first, kGradientsAt);
    launch(*gradients, grid_of(rows), stream, args);
  }
  if (sinks) launch(*sinks, grid_of(call.heads), stream, args);
}

}  // namespace narrows::cuda
