#include "cuda/backward_sm90.hpp"

#include "cuda/tensor_map.hpp"
#include "plan/sm90_backward.hpp"

namespace narrows::cuda {
namespace {

constexpr int kBackwardNumber = 14;  // among those of kernel.hpp's keys

ProgramKey key_of(const BackwardSm90Constants& constants) {
  KeyBits bits;
  for (const i32 size : {constants.head_width, constants.value_width, constants.query_block, constants.key_block})
    bits.add(size, 16);
  bits.add(kBackwardNumber, 4);
  for (const i32 number :
       {static_cast<i32>(constants.element), constants.cluster, constants.stages, constants.output_stages})
    bits.add(number, 4);
  for (const i32 number : {constants.pace, constants.turn_rows / 64, constants.sum_registers, constants.key_registers})
    bits.add(number, 8);
  for (const bool flag : {constants.limits_keys, constants.natural, constants.softcap, constants.alibi,
                          constants.deterministic, constants.takes_turns})
    bits.add(flag, 1);
  return bits.key();
}

}  // namespace

const Kernel& backward_sm90_kernel(const Problem& problem, Stream stream) {
  const BackwardSm90Constants constants = backward_sm90_constants(problem);
  return kernel(problem.device.index, key_of(constants), stream, [&] { return backward_sm90_program(constants); });
}

void prepare_backward_sm90(const Problem& problem) {
  const BackwardSm90Constants constants = backward_sm90_constants(problem);
  const ProgramKey key = key_of(constants);
  if (!find_kernel(problem.device.index, key)) load_kernel(problem.device.index, key, backward_sm90_program(constants));
}

Grid backward_sm90_grid(const Problem& problem, const Plan& plan, i64 blocks) {
  const BackwardSm90Constants constants = backward_sm90_constants(problem);
  return {static_cast<unsigned>(constants.cluster * blocks), static_cast<unsigned>(backward_sm90_threads(constants)),
          static_cast<unsigned>(plan.shared_bytes)};
}

BackwardSm90Args backward_sm90_args(const BackwardArgs& common, const Problem& problem, const Plan& plan,
                                    const Buffers& buffers) {
  BackwardSm90Args args;
  static_cast<BackwardArgs&>(args) = common;
  const i64 sequences = problem.query_form == QueryForm::varlen ? 1 : problem.batch;
  const i64 key_sequences = problem.key_form == KeyForm::varlen ? 1 : problem.batch;
  const i64 cluster = backward_sm90_constants(problem).cluster;  // each thread block brings so much less
  const auto queries = [&](const View& view, i64 columns) {
    return tensor_map(view, {sequences, problem.query_rows, problem.heads, columns}, plan.query_block / cluster);
  };
  const auto keys = [&](const View& view, i64 columns) {
    return tensor_map(view, {key_sequences, problem.key_rows, problem.kv_heads, columns}, plan.key_block / cluster);
  };
  args.q_map = queries(buffers.q, problem.head_dim);
  args.dout_map = queries(buffers.dout, problem.value_dim);
  args.k_map = keys(buffers.k, problem.head_dim);
  args.v_map = keys(buffers.v, problem.value_dim);
  return args;
}

}  // namespace narrows::cuda
