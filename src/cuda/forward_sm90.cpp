#include "cuda/forward_sm90.hpp"

#include "cuda/call_args.hpp"
#include "cuda/decode.hpp"
#include "cuda/kernel.hpp"
#include "cuda/scratch.hpp"
#include "cuda/tensor_map.hpp"
#include "plan/sm80_decode.hpp"
#include "plan/sm90.hpp"
#include "shared/cached_forward_args.h"

namespace narrows::cuda {
namespace {

constexpr int kKernelNumber = 15;  // among those of kernel.hpp's keys
constexpr i64 kPartRows = 64;      // of a box of Q and O

ProgramKey key_of(const ForwardSm90Constants& constants) {
  KeyBits bits;
  for (const i32 size : {constants.head_width, constants.value_width, constants.query_block, constants.key_block})
    bits.add(size, 16);
  bits.add(kKernelNumber, 4);
  for (const i32 number :
       {static_cast<i32>(constants.element), constants.stages, constants.query_stages, constants.fact_slots})
    bits.add(number, 4);
  for (const i32 number :
       {constants.warps, constants.bring_registers, constants.compute_registers, constants.tiles_before_wait + 1})
    bits.add(number, 8);
  for (const bool flag :
       {constants.queries_in_registers, constants.own_output_tile, constants.takes_turns, constants.limits_keys,
        constants.natural, constants.softcap, constants.alibi, constants.cached, constants.gathers})
    bits.add(flag, 1);
  return bits.key();
}

/// What the copy engine is told of keys: nothing where it brings none.
void set_key_maps(ForwardSm90Args& args, const Problem& problem, const Plan& plan, const Buffers& buffers) {
  const i32 box_rows = forward_sm90_box_rows(problem, narrow(plan.key_block));
  if (box_rows == 0) return;
  const bool cached = problem.key_form == KeyForm::cache || problem.key_form == KeyForm::pages;
  const i64 sequences = cached ? problem.key_batches : problem.key_form == KeyForm::varlen ? 1 : problem.batch;
  const auto keys = [&](const View& view, i64 columns) {
    return tensor_map(view, {sequences, problem.key_rows, problem.kv_heads, columns}, box_rows);
  };
  args.k_map = keys(buffers.k, problem.head_dim);
  args.v_map = keys(buffers.v, problem.value_dim);
}

ForwardSm90Args sm90_args(const Problem& problem, const Plan& plan, const Buffers& buffers, i64 tiles) {
  ForwardSm90Args args{};  // no map, where rows are gathered
  static_cast<ForwardArgs&>(args) = forward_args(problem, plan, buffers);
  const i64 sequences = problem.query_form == QueryForm::varlen ? 1 : problem.batch;
  const auto queries = [&](const View& view, i64 columns) {
    return tensor_map(view, {sequences, problem.query_rows, problem.heads, columns}, kPartRows);
  };
  args.q_map = queries(buffers.q, problem.head_dim);
  set_key_maps(args, problem, plan, buffers);
  args.o_map = queries(buffers.o, problem.value_dim);
  args.set_tiles(static_cast<u32>(tiles / args.blocks));
  return args;
}

/// cache: the call as the kernels of caches are given it.
CachedForwardArgs cached_args(const ForwardSm90Args& common, const DecodeArgs& cache, const Problem& problem,
                              const Plan& plan) {
  CachedForwardArgs args;
  static_cast<ForwardSm90Args&>(args) = common;
  args.cache = cache;
  const i32 key_block = narrow(plan.key_block);
  args.box_rows = forward_sm90_box_rows(problem, key_block);
  if (args.box_rows) args.boxes = key_block / args.box_rows;
  return args;
}

/// A region of the scratch; null: there is none.
std::byte* region(const Plan& plan, const Scratch& scratch, Sm90ForwardRegion wanted) {
  std::byte* at = scratch.data();
  const auto number = static_cast<std::size_t>(wanted);
  for (std::size_t before = 0; before < number; ++before) at += plan.workspace[before].bytes;
  return plan.workspace[number].bytes ? at : nullptr;
}

/// find(key, make_program)
struct Sm90Kernels {
  const Kernel* append = nullptr;   // null: nothing is appended
  const Kernel* forward = nullptr;  // null: there is no query row

  template <class Find>
  Sm90Kernels(const Problem& problem, const ForwardSm90Constants& constants, bool rows, Find find) {
    const Element element = constants.element;
    if (appends_rows(problem)) append = &find(append_key(element), [&] { return append_program(element); });
    if (rows) forward = &find(key_of(constants), [&] { return forward_sm90_program(constants); });
  }
};

}  // namespace

void run_forward_sm90(const Problem& problem, const Plan& plan, const Buffers& buffers) {
  const i64 tiles = problem.query_rows == 0 ? 0 : forward_sm90_tiles(problem, plan.query_block);
  const ForwardSm90Constants constants = forward_sm90_constants(problem);
  const auto stream = static_cast<Stream>(buffers.stream);
  const Sm90Kernels kernels(problem, constants, tiles != 0,
                            [&](const ProgramKey& key, const auto& make) -> const Kernel& {
                              return kernel(problem.device.index, key, stream, make);
                            });
  if (!kernels.append && !kernels.forward) return;
  ForwardSm90Args args;
  if (kernels.forward) args = sm90_args(problem, plan, buffers, tiles);
  const Scratch scratch(plan, buffers);
  DecodeArgs cache;
  if (constants.cached) cache = cache_args(problem, buffers, constants.natural);
  if (kernels.append) {
    cache.refused = reinterpret_cast<i32*>(region(plan, scratch, Sm90ForwardRegion::refused));
    launch_append(*kernels.append, problem, cache, plan.blocks, stream);
  }
  if (!kernels.forward) return;
  if (std::byte* const counter = region(plan, scratch, Sm90ForwardRegion::tiles_taken)) {
    args.tiles_taken = reinterpret_cast<u32*>(counter);
    clear(counter, plan.workspace.front().bytes, stream);
  }
  constexpr int kBringWarps = 4;
  const Grid grid{static_cast<unsigned>(plan.thread_blocks), static_cast<unsigned>(32 * (plan.warps + kBringWarps)),
                  static_cast<unsigned>(plan.shared_bytes)};
  if (constants.cached)
    launch(*kernels.forward, grid, stream, cached_args(args, cache, problem, plan));
  else
    launch(*kernels.forward, grid, stream, args);
}

void prepare_forward_sm90(const Problem& problem) {
  const CurrentDevice current(problem.device.index);
  Sm90Kernels(problem, forward_sm90_constants(problem), true,
              [&](const ProgramKey& key, const auto& make) -> const Kernel& {
                const Kernel* loaded = find_kernel(problem.device.index, key);
                return loaded ? *loaded : load_kernel(problem.device.index, key, make());
              });
}

}  // namespace narrows::cuda
