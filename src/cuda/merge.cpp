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
constexpr i32 kMergeKernel = 8;
constexpr i64 kMostMergeBlocks = i64{1} << 16;  // they take every so many rows

ProgramKey key_of_merge(Element element) {
  KeyBits bits;
  bits.add(0, 64);
  bits.add(kMergeKernel, 4);
  bits.add(static_cast<i32>(element), 8);
  return bits.key();
}

void require_merge(const MergeCall& call) {
  if (call.dtype == DType::fp64) refuse_type("o", call.dtype, "fp64 is for the CPU", "fp32");
  if (call.parts.size() > kMostParts)
    refuse_value("parts", text(call.parts.size(), " parts"), text("must be at most ", kMostParts, " on a GPU"),
                 to_text(kMostParts));
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

}  // namespace

void run_merge(const MergeCall& call, void* stream) {
  require_merge(call);
  const i64 rows = call.batch * call.rows * call.heads;
  const auto element = static_cast<Element>(call.dtype);
  const CurrentDevice current(call.device.index);
  if (rows == 0) return;
  const Kernel& merging = kernel(call.device.index, key_of_merge(element), static_cast<Stream>(stream),
                                 [&] { return merge_program(element); });
  const auto blocks = static_cast<unsigned>(std::min(ceil_div<i64>(rows, kMergeWarps), kMostMergeBlocks));
  launch(merging, {blocks, 32 * kMergeWarps, 0}, static_cast<Stream>(stream), merge_args(call));
}

}  // namespace narrows::cuda
