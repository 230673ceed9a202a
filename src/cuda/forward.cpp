#include "cuda/forward.hpp"

#include "cuda/kernel.hpp"
#include "plan/sm80.hpp"
#include "shared/tile_order.h"

#include <algorithm>
#include <limits>

namespace narrows::cuda {
namespace {

TensorArg tensor_arg(const View& view) {
  TensorArg arg;
  arg.data = reinterpret_cast<char*>(view.data);
  for (std::size_t axis = 0; axis < view.strides.size(); ++axis) arg.strides[axis] = view.strides[axis];
  arg.element = static_cast<Element>(view.dtype);
  return arg;
}

IndicesArg indices_arg(const Indices& indices) { return {indices.data, indices.stride}; }

LateArg late_arg(const LateNumber& number) {
  LateArg arg;
  arg.value = number.value;
  arg.place = reinterpret_cast<const i64*>(number.place);
  return arg;
}

/// The planner has seen to what is not a size of a bias or a mask.
i32 narrow(i64 size) { return static_cast<i32>(std::min<i64>(size, std::numeric_limits<i32>::max())); }

DropoutRule dropout_rule(const Problem& problem) {
  const Origin& origin = problem.rules.origin;
  DropoutRule rule;
  rule.threshold = keep_threshold(problem.rules.dropout);
  rule.origin_batch = origin.b;
  rule.origin_head = origin.h;
  rule.origin_row = origin.i;
  rule.origin_key = origin.j;
  rule.heads = origin.H ? origin.H : problem.heads;
  return rule;
}

ProgramKey key_of(const ForwardConstants& constants) {
  ProgramKey key;
  int shift = 0;
  const auto append = [&](u64& bits, u64 value, int width) {
    bits |= value << shift;
    shift += width;
  };
  for (const i32 size : {constants.head_width, constants.value_width, constants.query_block, constants.key_block})
    append(key.low, static_cast<u64>(size), 16);
  shift = 0;
  for (const i32 number : {static_cast<i32>(constants.element), static_cast<i32>(constants.bias_element),
                           constants.warps, constants.copy_bytes, constants.resident_blocks})
    append(key.high, static_cast<u64>(number), 8);
  for (const bool rule :
       {constants.natural, constants.softcap, constants.alibi, constants.bias, constants.mask, constants.dropout})
    append(key.high, rule, 1);
  return key;
}

}  // namespace

ForwardArgs forward_args(const Problem& problem, const Plan& plan, const Buffers& buffers) {
  ForwardArgs args;
  args.q = tensor_arg(buffers.q);
  args.k = tensor_arg(buffers.k);
  args.v = tensor_arg(buffers.v);
  args.o = tensor_arg(buffers.o);
  args.lse = tensor_arg(buffers.lse);
  args.bias = tensor_arg(buffers.bias);
  args.mask = tensor_arg(buffers.mask);
  args.alibi_slopes = tensor_arg(buffers.alibi_slopes);
  args.sinks = tensor_arg(buffers.sinks);
  args.cu_seqlens_q = indices_arg(buffers.cu_seqlens_q);
  args.cu_seqlens_k = indices_arg(buffers.cu_seqlens_k);
  args.seqused_q = indices_arg(buffers.seqused_q);
  args.seqused_k = indices_arg(buffers.seqused_k);
  args.shift = indices_arg(buffers.shift);
  args.batch = narrow(problem.batch);
  args.heads = narrow(problem.heads);
  args.group = narrow(problem.group());
  args.query_rows = narrow(problem.query_rows);
  args.key_rows = narrow(problem.key_rows);
  args.head_dim = narrow(problem.head_dim);
  args.value_dim = narrow(problem.value_dim);
  args.score_rows = narrow(problem.score_rows);
  args.score_keys = narrow(problem.score_keys);
  args.top_left = problem.rules.causal == Causal::top_left;
  args.visibility = problem.rules.mask;
  const bool natural = forward_constants(problem, plan).natural;
  args.units = natural ? natural_units<float>() : fused_units<float>(problem.rules.scale);
  args.rules = score_rules<float>(problem.rules.scale, problem.rules.softcap, 0.f);
  args.dropout = dropout_rule(problem);
  args.seed = late_arg(buffers.seed);
  args.offset = late_arg(buffers.offset);
  args.section = narrow(plan.section);
  const bool varlen = problem.query_form == QueryForm::varlen;
  const i32 rows_of_block = narrow(plan.query_block);
  args.blocks = narrow(varlen ? block_count(problem.query_rows, args.batch, rows_of_block)
                              : ceil_div<i64>(problem.query_rows, rows_of_block));
  args.status = buffers.status;
  return args;
}

void run_forward(const Problem& problem, const Plan& plan, const Buffers& buffers) {
  const ForwardArgs args = forward_args(problem, plan, buffers);
  const i64 pairs = i64{problem.query_form == QueryForm::varlen ? 1 : args.batch} * args.heads;
  const i64 blocks = problem.query_rows == 0 ? 0 : args.blocks * pairs;
  if (blocks == 0) return;
  const CurrentDevice current(problem.device.index);
  const ForwardConstants constants = forward_constants(problem, plan);
  const auto stream = static_cast<Stream>(buffers.stream);
  const Kernel& loaded =
      kernel(problem.device.index, key_of(constants), stream, [&] { return forward_program(constants); });
  const Grid grid{static_cast<unsigned>(blocks), static_cast<unsigned>(32 * plan.warps),
                  static_cast<unsigned>(plan.shared_bytes)};
  launch(loaded, grid, stream, args);
}

void prepare_forward(const Problem& problem, const Plan& plan) {
  const CurrentDevice current(problem.device.index);
  const ForwardConstants constants = forward_constants(problem, plan);
  const ProgramKey key = key_of(constants);
  if (!find_kernel(problem.device.index, key)) load_kernel(problem.device.index, key, forward_program(constants));
}

}  // namespace narrows::cuda
