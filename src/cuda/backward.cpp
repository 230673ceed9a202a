#include "cuda/backward.hpp"

#include "cuda/backward_sm90.hpp"
#include "cuda/call_args.hpp"
#include "cuda/kernel.hpp"
#include "cuda/scratch.hpp"
#include "plan/sm80_backward.hpp"

#include <array>

namespace narrows::cuda {
namespace {

constexpr std::array kKernels{BackwardKernel::rows, BackwardKernel::keys, BackwardKernel::queries, BackwardKernel::sums,
                              BackwardKernel::bias};

ProgramKey key_of(BackwardKernel kernel, const BackwardConstants& constants) {
  KeyBits bits;
  for (const i32 size : {constants.head_width, constants.value_width, constants.query_block, constants.key_block})
    bits.add(size, 16);
  bits.add(1 + static_cast<i32>(kernel), 4);  // of the kernels; 0 is forward's
  for (const i32 number : {static_cast<i32>(constants.element), static_cast<i32>(constants.bias_element),
                           constants.column_warps, constants.stages, constants.resident_blocks})
    bits.add(number, 4);
  for (const i32 number : {constants.warps, constants.copy_bytes}) bits.add(number, 8);
  for (const bool rule : {constants.vector_sums, constants.deterministic, constants.natural, constants.softcap,
                          constants.alibi, constants.bias, constants.mask, constants.dropout, constants.facts_apart})
    bits.add(rule, 1);
  return bits.key();
}

bool is_wanted(BackwardKernel kernel, const Problem& problem) {
  switch (kernel) {
    case BackwardKernel::rows: return true;
    case BackwardKernel::keys: return problem.wants_dq || problem.wants_dk || problem.wants_dv || problem.wants_dslopes;
    case BackwardKernel::queries: return problem.wants_dq;
    case BackwardKernel::sums: return problem.wants_dslopes || problem.wants_dsinks;
    case BackwardKernel::bias: return problem.wants_dbias;
  }
  return false;
}

/// Thread blocks of a kernel; 0: not launched.
i64 blocks_of(BackwardKernel kernel, const Problem& problem, const Plan& plan) {
  if (!is_wanted(kernel, problem)) return 0;
  const Sm80BackwardBlocks blocks = backward_blocks(problem, plan.query_block, plan.key_block);
  switch (kernel) {
    case BackwardKernel::rows:  // of no rows: it still looks at what lies on the device
    case BackwardKernel::queries: return blocks.query_pairs * blocks.query_blocks;
    case BackwardKernel::keys: return problem.key_rows == 0 ? 0 : blocks.key_pairs * blocks.key_blocks;
    case BackwardKernel::sums: return (problem.dslopes_per_batch ? problem.batch : 1) * problem.heads;
    case BackwardKernel::bias: return bias_blocks(problem, plan.query_block, plan.key_block);
  }
  return 0;
}

struct Launch {
  const Kernel* kernel = nullptr;
  Grid grid;
};

/// Whether family sm90 has a kernel of its own for it.
bool is_sm90(BackwardKernel kernel, const Plan& plan) {
  return kernel == BackwardKernel::keys && plan.family == "sm90";
}

Launch launch_of(BackwardKernel which, i64 blocks, const Problem& problem, const Plan& plan, Stream stream) {
  if (is_sm90(which, plan)) return {&backward_sm90_kernel(problem, stream), backward_sm90_grid(problem, plan, blocks)};
  const BackwardConstants own = constants_of(which, backward_constants(problem, plan));
  return {&kernel(problem.device.index, key_of(which, own), stream, [&] { return backward_program(which, own); }),
          {static_cast<unsigned>(blocks), static_cast<unsigned>(32 * own.warps),
           static_cast<unsigned>(backward_shared_bytes(which, own))}};
}

i64 bytes_of(const Plan& plan, Sm80Region region) { return plan.workspace[static_cast<std::size_t>(region)].bytes; }

/// What kernels count and add to begins at 0, behind what the first kernel writes.
void clear_counts(const Plan& plan, std::byte* scratch, Stream stream) {
  const i64 before = bytes_of(plan, Sm80Region::rows) + bytes_of(plan, Sm80Region::query_sums);
  clear(scratch + before, plan.workspace_bytes() - before, stream);
}

}  // namespace

BackwardArgs backward_args(const Problem& problem, const Plan& plan, const Buffers& buffers, std::byte* scratch) {
  BackwardArgs args;
  set_call_args(args, problem, buffers, backward_constants(problem, plan).natural);
  args.q = tensor_arg(buffers.q);
  args.k = tensor_arg(buffers.k);
  args.v = tensor_arg(buffers.v);
  args.o = tensor_arg(buffers.o);
  args.dout = tensor_arg(buffers.dout);
  args.lse = tensor_arg(buffers.lse);
  args.dlse = tensor_arg(buffers.dlse);
  args.dq = tensor_arg(buffers.dq);
  args.dk = tensor_arg(buffers.dk);
  args.dv = tensor_arg(buffers.dv);
  args.dbias = tensor_arg(buffers.dbias);
  args.dslopes = tensor_arg(buffers.dslopes);
  args.dsinks = tensor_arg(buffers.dsinks);
  args.slopes_of_sequences = problem.dslopes_per_batch;
  for (std::size_t axis = 0; axis < problem.dbias_sizes.size(); ++axis)
    args.bias_sizes[axis] = narrow(problem.dbias_sizes[axis]);
  const Sm80BackwardBlocks blocks = backward_blocks(problem, plan.query_block, plan.key_block);
  args.kv_heads = narrow(problem.kv_heads);
  args.query_blocks = narrow(blocks.query_blocks);
  args.key_blocks = narrow(blocks.key_blocks);
  args.section = narrow(plan.section);
  std::array<std::byte*, 6> regions{};
  for (std::size_t index = 0; index < regions.size(); scratch += plan.workspace[index++].bytes)
    if (plan.workspace[index].bytes) regions[index] = scratch;
  const auto at = [&](Sm80Region region) { return regions[static_cast<std::size_t>(region)]; };
  args.rows = reinterpret_cast<RowFacts*>(at(Sm80Region::rows));
  args.far_rows = reinterpret_cast<u32*>(at(Sm80Region::far_rows));
  args.query_sums = reinterpret_cast<float*>(at(Sm80Region::query_sums));
  args.slope_sums = reinterpret_cast<float*>(at(Sm80Region::slope_sums));
  args.sink_sums = reinterpret_cast<float*>(at(Sm80Region::sink_sums));
  args.turns = reinterpret_cast<u32*>(at(Sm80Region::turns));
  if (args.turns) args.begun = args.turns + backward_turns(problem, plan.query_block, plan.warps);
  return args;
}

void run_backward(const Problem& problem, const Plan& plan, const Buffers& buffers) {
  const auto stream = static_cast<Stream>(buffers.stream);
  std::array<Launch, kKernels.size()> launches;
  for (std::size_t index = 0; index < launches.size(); ++index)
    if (const i64 blocks = blocks_of(kKernels[index], problem, plan))
      launches[index] = launch_of(kKernels[index], blocks, problem, plan, stream);
  const Scratch scratch(plan, buffers);
  const BackwardArgs args = backward_args(problem, plan, buffers, scratch.data());
  clear_counts(plan, scratch.data(), stream);
  for (std::size_t index = 0; index < launches.size(); ++index) {
    const Launch& next = launches[index];
    if (!next.kernel) continue;
    if (is_sm90(kKernels[index], plan))
      launch(*next.kernel, next.grid, stream, backward_sm90_args(args, problem, plan, buffers));
    else
      launch(*next.kernel, next.grid, stream, args);
  }
}

void prepare_backward(const Problem& problem, const Plan& plan) {
  const CurrentDevice current(problem.device.index);
  const BackwardConstants constants = backward_constants(problem, plan);
  for (const BackwardKernel which : kKernels) {
    if (!is_wanted(which, problem)) continue;
    if (is_sm90(which, plan)) {
      prepare_backward_sm90(problem);
      continue;
    }
    const BackwardConstants own = constants_of(which, constants);
    const ProgramKey key = key_of(which, own);
    if (!find_kernel(problem.device.index, key)) load_kernel(problem.device.index, key, backward_program(which, own));
  }
}

}  // namespace narrows::cuda
