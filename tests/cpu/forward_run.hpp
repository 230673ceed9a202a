// Runs the blocked forward with chosen blocks, threads and instruction set, so that small calls have many tiles.
#pragma once

#include "core/work.hpp"
#include "cpu/forward.hpp"
#include "cpu/tile_kernels.hpp"
#include "plan/cpu_forward.hpp"
#include "tests/support/attention.hpp"
#include "tests/support/instruction_sets.hpp"

#include <cstdlib>
#include <string>
#include <vector>

namespace narrows::test {

struct Blocks {
  std::string instruction_set = {};  // empty: the best
  int threads = 2;
  i64 query_block = 24, key_block = 32, heads_at_once = 2;
  bool packs_ahead = true;
  i64 split_keys = 0;
  bool reads_in_place = false;
  i64 heads_together = 1;
};

inline void run_forward(const Inputs& in, const Outputs& out, const Options& options, const Blocks& blocks = {}) {
  const Call call = make_forward(in, out, options);
  const InstructionSets sets(blocks.instruction_set);
  Plan plan = choose(call.problem, work(call), sets.machine(), "cpu").plan;
  plan.instruction_set = sets.executing(plan.instruction_set);
  plan.threads = blocks.threads;
  plan.query_block = blocks.query_block;
  plan.key_block = blocks.key_block;
  plan.heads_at_once = blocks.heads_at_once;
  plan.reads_in_place = blocks.reads_in_place && plan.operand == accumulator(call.problem.dtype);
  plan.packs_ahead = blocks.packs_ahead && !plan.reads_in_place;
  plan.split_keys = blocks.split_keys;
  plan.heads_together = blocks.heads_together;
  plan.workspace = forward_scratch(call.problem, plan);
  cpu::run_forward(call.problem, plan, call.buffers);
}
/// By the plan as it is made.
inline void run_planned(Attention& a, const std::string& instruction_set) {
  const Call call = make_forward(a.in(), a.out(), a.options);
  const InstructionSets sets(instruction_set);
  Plan plan = choose(call.problem, work(call), sets.machine(), "cpu").plan;
  plan.instruction_set = sets.executing(plan.instruction_set);
  cpu::run_forward(call.problem, plan, call.buffers);
}
inline void run_forward(Attention& a, const Blocks& blocks = {}) { run_forward(a.in(), a.out(), a.options, blocks); }

inline bool same_results(const Attention& a, const Attention& b) {
  return a.o.same_bits(b.o) && a.lse.same_bits(b.lse);
}

/// The same elements seen through a negative stride: axis 0 of `t` becomes its reverse, and so on.
inline Tensor reversed(Tensor t, std::size_t axis) {
  const std::int64_t last = (t.shape[axis] - 1) * t.strides[axis];
  t.data = static_cast<std::byte*>(t.data) + last * static_cast<std::int64_t>(item_size(t.dtype));
  t.strides[axis] = -t.strides[axis];
  return t;
}

/// Every index of `axis` reads index 0.
inline Tensor expanded(Tensor t, std::size_t axis) {
  t.strides[axis] = 0;
  return t;
}

/// `few` under NARROWS_TEST_SMALL=1, for sanitizers.
inline int repeats(int many, int few) { return std::getenv("NARROWS_TEST_SMALL") ? few : many; }

}  // namespace narrows::test
