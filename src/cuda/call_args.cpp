#include "cuda/call_args.hpp"

#include <algorithm>
#include <limits>

namespace narrows::cuda {
namespace {

IndicesArg indices_arg(const Indices& indices) { return {indices.data, indices.stride}; }

RowIndicesArg row_indices_arg(const Indices& indices) { return {indices.data, indices.row_stride, indices.stride}; }

LateArg late_arg(const LateNumber& number) {
  LateArg arg;
  arg.value = number.value;
  arg.place = reinterpret_cast<const i64*>(number.place);
  return arg;
}

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

}  // namespace

TensorArg tensor_arg(const View& view) {
  TensorArg arg;
  arg.data = reinterpret_cast<char*>(view.data);
  for (std::size_t axis = 0; axis < view.strides.size(); ++axis) arg.strides[axis] = view.strides[axis];
  arg.element = static_cast<Element>(view.dtype);
  return arg;
}

i32 narrow(i64 size) { return static_cast<i32>(std::min<i64>(size, std::numeric_limits<i32>::max())); }

void set_call_args(CallArgs& args, const Problem& problem, const Buffers& buffers, bool natural) {
  args.bias = tensor_arg(buffers.bias);
  args.mask = tensor_arg(buffers.mask);
  args.alibi_slopes = tensor_arg(buffers.alibi_slopes);
  args.sinks = tensor_arg(buffers.sinks);
  args.cu_seqlens_q = indices_arg(buffers.cu_seqlens_q);
  args.cu_seqlens_k = indices_arg(buffers.cu_seqlens_k);
  args.seqused_q = indices_arg(buffers.seqused_q);
  args.seqused_k = indices_arg(buffers.seqused_k);
  args.shift = indices_arg(buffers.shift);
  args.key_begin = row_indices_arg(buffers.key_begin);
  args.key_end = row_indices_arg(buffers.key_end);
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
  args.units = natural ? natural_units<float>() : fused_units<float>(problem.rules.scale);
  args.rules = score_rules<float>(problem.rules.scale, problem.rules.softcap, 0.f);
  args.dropout = dropout_rule(problem);
  args.seed = late_arg(buffers.seed);
  args.offset = late_arg(buffers.offset);
  args.status = buffers.status;
}

}  // namespace narrows::cuda
