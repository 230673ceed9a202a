// What forward and backward calls have in common.
#pragma once

#include "core/problem.hpp"
#include "cpu/dropout.hpp"
#include "cpu/row_logits.hpp"
#include "cpu/tile_kernels.hpp"
#include "plan/scratch.hpp"

namespace narrows::cpu {

template <class T> struct KernelCall {
  const Problem& problem;
  const Buffers& buffers;
  const TileKernels<T>& kernels;
  Units<T> units;
  bool score_rules;  // softcap, ALiBi or bias: scores become logits before the softmax
  DropoutRule dropout;
  i64 query_block;  // query rows of a task's block
  i64 key_block;    // keys of a tile, a multiple of kernels.columns
  i64 query_depth;  // d in whole depths of the products
  i64 value_depth;  // dv in whole depths
  i64 value_width;  // dv in whole strips

  /// Bytes of this many packed elements.
  i64 packed(i64 elements) const { return elements * packed_item; }
  i64 packed_item;
};

template <class T> KernelCall<T> kernel_call(const Problem& problem, const Plan& plan, const Buffers& buffers) {
  const TileKernels<T>& kernels = tile_kernels<T>(plan.instruction_set);
  const bool rules = has_score_rules(problem, buffers);
  return {.problem = problem,
          .buffers = buffers,
          .kernels = kernels,
          .units = rules ? natural_units<T>() : fused_units<T>(problem.rules.scale),
          .score_rules = rules,
          .dropout = dropout_rule(problem, buffers),
          .query_block = plan.query_block,
          .key_block = round_up(plan.key_block, kernels.columns),
          .query_depth = round_up(problem.head_dim, kernels.depth),
          .value_depth = round_up(problem.value_dim, kernels.depth),
          .value_width = round_up(problem.value_dim, kernels.columns),
          .packed_item = static_cast<i64>(item_size(kernels.operand))};
}

}  // namespace narrows::cpu
