// Runs the blocked backward with chosen blocks, threads and instruction set, so that small calls have many tiles.
#pragma once

#include "core/work.hpp"
#include "cpu/backward.hpp"
#include "cpu/reference.hpp"
#include "cpu/tile_kernels.hpp"
#include "plan/cpu_backward.hpp"
#include "tests/support/attention.hpp"
#include "tests/support/check.hpp"
#include "tests/support/instruction_sets.hpp"

#include <string>

namespace narrows::test {

struct BackwardBlocks {
  std::string instruction_set = {};  // empty: the best
  int threads = 2;
  i64 query_block = 24, key_block = 32, key_chunk = 64, partials = 2, heads_at_once = 2;
};

inline void run_backward(const BackwardInputs& in, const Gradients& out, const Options& options,
                         const BackwardBlocks& blocks = {}) {
  const Call call = make_backward(in, out, options);
  const InstructionSets sets(blocks.instruction_set);
  Plan plan = choose(call.problem, work(call), sets.machine(), "cpu").plan;
  plan.instruction_set = sets.executing(plan.instruction_set);
  plan.threads = blocks.threads;
  plan.query_block = blocks.query_block;
  plan.key_block = blocks.key_block;
  plan.key_chunk = blocks.key_chunk;
  plan.partials = blocks.partials;
  plan.heads_at_once = blocks.heads_at_once;
  plan.workspace = backward_scratch(call.problem, plan);
  cpu::run_backward(call.problem, plan, call.buffers);
}

/// A backward call with o and lse of the oracle, and all the gradients that its options allow.
struct BackwardCase : Attention {
  Array bias, slopes, sinks, mask;
  Array dbias, dslopes, dsinks;

  BackwardCase() = default;
  explicit BackwardCase(const Sizes& s, DType dtype = DType::fp32, std::uint64_t seed = 1)
      : Attention(s, dtype, seed) {}
  explicit BackwardCase(Attention attention) : Attention(std::move(attention)) {}

  BackwardCase& with_bias(const Dims& shape, DType dtype = DType::fp32) {
    bias = Array(dtype, shape).fill_gaussian(51);
    dbias = Array(dtype, shape);
    options.bias = bias;
    return *this;
  }
  BackwardCase& with_slopes(const Dims& shape, DType dtype = DType::fp32) {
    slopes = Array(dtype, shape).fill([](const Dims& at) {
      return 0.25 / static_cast<double>(1 + at[0] + 2 * at[at.rank() - 1]);
    });
    dslopes = Array(dtype, shape);
    options.alibi_slopes = slopes;
    return *this;
  }
  BackwardCase& with_sinks(const std::vector<double>& values, DType dtype = DType::fp32) {
    sinks = Array(dtype, {static_cast<std::int64_t>(values.size())}, values);
    dsinks = Array(dtype, sinks.shape());
    options.sinks = sinks;
    return *this;
  }
  BackwardCase& with_dlse() {
    dlse = Array(lse.dtype(), lse.shape()).fill_gaussian(61);
    return *this;
  }
  BackwardCase& with_dropout(double p) {
    options.dropout = p;
    options.seed = 0x0123456789ABCDEF;
    options.offset = 7;
    return *this;
  }

  void forward_by_oracle() { reference::forward(in(), out(), options); }
  Gradients wanted() const { return {dq, dk, dv, dbias, dslopes, dsinks}; }
  std::vector<Array*> results() {
    std::vector<Array*> given;
    for (Array* array : {&dq, &dk, &dv, &dbias, &dslopes, &dsinks})
      if (array->given()) given.push_back(array);
    return given;
  }
  void poison_results() {
    for (Array* array : results()) array->poison();
  }
  void run(const BackwardBlocks& blocks = {}) {
    poison_results();
    run_backward(backward_in(), wanted(), options, blocks);
  }
  /// Against the criterion.
  testing::AssertionResult agrees() const { return backward_agrees(backward_in(), wanted(), options); }
};

inline void expect_right(BackwardCase& c, const BackwardBlocks& blocks = {}) {
  c.forward_by_oracle();
  c.run(blocks);
  EXPECT_TRUE(c.agrees());
}

}  // namespace narrows::test
