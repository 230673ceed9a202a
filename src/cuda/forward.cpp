#include "cuda/forward.hpp"

#include "cuda/call_args.hpp"
#include "cuda/forward_sm90.hpp"
#include "cuda/kernel.hpp"
#include "plan/sm80.hpp"
#include "shared/tile_order.h"

namespace narrows::cuda {
namespace {

ProgramKey key_of(const ForwardConstants& constants) {
  KeyBits bits;
  for (const i32 size : {constants.head_width, constants.value_width, constants.query_block, constants.key_block})
    bits.add(size, 16);
  bits.add(0, 4);  // of the kernels
  for (const i32 number : {static_cast<i32>(constants.element), static_cast<i32>(constants.bias_element),
                           constants.warps, constants.copy_bytes, constants.resident_blocks})
    bits.add(number, 8);
  bits.add(constants.value_slices, 2);
  for (const bool rule : {constants.skips_rescale, constants.natural, constants.softcap, constants.alibi,
                          constants.bias, constants.mask, constants.dropout})
    bits.add(rule, 1);
  return bits.key();
}

}  // namespace

ForwardArgs forward_args(const Problem& problem, const Plan& plan, const Buffers& buffers) {
  ForwardArgs args;
  args.q = tensor_arg(buffers.q);
  args.k = tensor_arg(buffers.k);
  args.v = tensor_arg(buffers.v);
  args.o = tensor_arg(buffers.o);
  args.lse = tensor_arg(buffers.lse);
  set_call_args(args, problem, buffers, forward_constants(problem, plan).natural);
  args.section = narrow(plan.section);
  const bool varlen = problem.query_form == QueryForm::varlen;
  const i32 rows_of_block = narrow(plan.query_block);
  args.blocks = narrow(varlen ? block_count(problem.query_rows, args.batch, rows_of_block)
                              : ceil_div<i64>(problem.query_rows, rows_of_block));
  return args;
}

void run_forward(const Problem& problem, const Plan& plan, const Buffers& buffers) {
  if (plan.family == "sm90") return run_forward_sm90(problem, plan, buffers);
  const ForwardArgs args = forward_args(problem, plan, buffers);
  const i64 pairs = i64{problem.query_form == QueryForm::varlen ? 1 : args.batch} * args.heads;
  const i64 blocks = problem.query_rows == 0 ? 0 : args.blocks * pairs * plan.value_slices;
  if (blocks == 0) return;
  const ForwardConstants constants = forward_constants(problem, plan);
  const auto stream = static_cast<Stream>(buffers.stream);
  const Kernel& loaded =
      kernel(problem.device.index, key_of(constants), stream, [&] { return forward_program(constants); });
  const Grid grid{static_cast<unsigned>(blocks), static_cast<unsigned>(32 * plan.warps),
                  static_cast<unsigned>(plan.shared_bytes)};
  launch(loaded, grid, stream, args);
}

void prepare_forward(const Problem& problem, const Plan& plan) {
  if (plan.family == "sm90") return prepare_forward_sm90(problem);
  const CurrentDevice current(problem.device.index);
  const ForwardConstants constants = forward_constants(problem, plan);
  const ProgramKey key = key_of(constants);
  if (!find_kernel(problem.device.index, key)) load_kernel(problem.device.index, key, forward_program(constants));
}

}  // namespace narrows::cuda
