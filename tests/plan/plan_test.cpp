#include "plan/plan.hpp"

#include <gmock/gmock.h>

#include "tests/core/call.hpp"

#include <array>
#include <random>

namespace narrows::test {
namespace {

constexpr std::string_view kAvx2 = "avx2";

Machine two_cores() {
  return {.device = {},
          .name = "test",
          .instruction_sets = {&kAvx2, 1},
          .threads = 2,
          .flops_per_second = 2e11,
          .bf16_flops_per_second = 8e11,
          .bytes_per_second = 4e10};
}

Choice choose_for(const TestCall& call, const Machine& machine, std::string_view forced = {}) {
  const Call made = call.make();
  return choose(made.problem, work(made), machine, forced);
}

std::string refusal(const TestCall& call, const Machine& machine, std::string_view forced = {}) {
  try {
    choose_for(call, machine, forced);
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

TEST(Plan, cpu_decisions) {
  const Plan plan = choose_for(TestCall::dense(), two_cores()).plan;
  EXPECT_EQ(plan.family, "cpu");
  EXPECT_EQ(plan.threads, 1);  // 7,840 FLOP are not worth waking a thread
  EXPECT_EQ(plan.heads_at_once, 4);
  EXPECT_EQ(plan.text(),
            "family cpu\ninstruction set avx2\nthreads 1\nquery block 192\nkey block 256\nkv heads at once 4\n"
            "keys read where they lie, kv heads together 2\nscratch kv heads 768 bytes\nscratch progress of heads 512 "
            "bytes\nscratch query "
            "blocks 36096 bytes\n");
}

TEST(Plan, names_what_it_does_not_take) {
  EXPECT_EQ(refusal(TestCall::dense(), two_cores(), "sm70"), "family: sm70: must be one of: sm90, sm80, cpu");
  Machine unknown = two_cores();
  const std::string_view mmx = "mmx";
  unknown.instruction_sets = {&mmx, 1};
  EXPECT_EQ(refusal(TestCall::dense(), unknown),
            "no family computes this (forward fp32 cpu b=2 h=4 hk=2 sq=5 sk=7 d=8 dv=6): "
            "cpu: no instruction set of test has tile sizes for fp32");
}

TEST(Plan, sets_that_multiply_bf16_take_what_they_compute_within_the_criterion) {
  const std::array<std::string_view, 3> sets{"amx", "avx512bf16", "avx512"};
  Machine machine = two_cores();
  machine.instruction_sets = sets;
  const auto chosen = [&](DType dtype, std::int64_t d, std::int64_t dv, i64 rotary = 0, bool backward = false,
                          std::int64_t sq = 40) {
    const Tensor q{nullptr, dtype, {1, sq, 1, d}, {}, {}}, k{nullptr, dtype, {1, 40, 1, d}, {}, {}};
    const Tensor v{nullptr, dtype, {1, 40, 1, dv}, {}, {}};
    Call made = make_explained({q, k, v}, {});
    made.problem.rotary_pairs = rotary;
    if (backward) made.problem.operation = Operation::backward;
    return choose(made.problem, work(made), machine).plan;
  };
  EXPECT_EQ(chosen(DType::bf16, 64, 64).instruction_set, "amx");
  EXPECT_EQ(chosen(DType::bf16, 64, 64).operand, DType::bf16);
  EXPECT_EQ(chosen(DType::bf16, 64, 64).depth, 32);
  EXPECT_EQ(chosen(DType::bf16, 64, 64, 0, true).instruction_set, "amx");
  EXPECT_EQ(chosen(DType::bf16, 8, 16).instruction_set, "amx");
  for (const DType dtype : {DType::fp16, DType::fp32, DType::fp64})
    EXPECT_EQ(chosen(dtype, 64, 64).instruction_set, "avx512") << name(dtype);
  EXPECT_EQ(chosen(DType::bf16, 64, 15).instruction_set, "avx512") << "few columns of O";
  EXPECT_EQ(chosen(DType::bf16, 8, 64, 0, true).instruction_set, "avx512") << "few columns of dQ";
  EXPECT_EQ(chosen(DType::bf16, 64, 64, 32).instruction_set, "avx512") << "rotated queries";
  EXPECT_EQ(chosen(DType::bf16, 64, 64, 0, false, 1).instruction_set, "avx512") << "keys read in place";
  EXPECT_TRUE(chosen(DType::bf16, 64, 64, 0, false, 1).reads_in_place);
  machine.instruction_sets = std::span(sets).first(1);
  EXPECT_EQ(chosen(DType::bf16, 64, 64, 0, false, 1).instruction_set, "amx");
  EXPECT_FALSE(chosen(DType::bf16, 64, 64, 0, false, 1).reads_in_place);
  machine.instruction_sets = std::span(sets).subspan(1);
  EXPECT_EQ(chosen(DType::bf16, 64, 64).instruction_set, "avx512bf16");
  EXPECT_EQ(chosen(DType::bf16, 64, 64).depth, 2);
}

TEST(Plan, scratch_is_linear_in_the_sequence_and_bounded) {
  const auto packed = [](std::int64_t queries, std::int64_t keys, std::int64_t heads) {
    const Tensor q{nullptr, DType::fp32, {1, queries, heads, 64}, {}, {}};
    const Tensor k{nullptr, DType::fp32, {1, keys, heads, 64}, {}, {}};
    const Call made = make_explained({q, k, k}, {});
    return choose(made.problem, work(made), two_cores()).plan.workspace.front().bytes;
  };
  EXPECT_EQ(packed(193, 512, 1), 512 * 128 * 4);
  EXPECT_EQ(packed(193, 1 << 20, 1), (std::int64_t{1} << 20) * 128 * 4);
  EXPECT_EQ(packed(193, 1 << 20, 64), (std::int64_t{1} << 20) * 128 * 4);  // one head is above the bound already
  EXPECT_LE(packed(193, 4096, 1000), std::int64_t{256} << 20);
  EXPECT_EQ(packed(192, 1 << 20, 64), 0);  // one query block packs tile by tile
}

Plan decoding(std::int64_t batch, std::int64_t keys, const Options& options) {
  const Tensor q{nullptr, DType::fp32, {batch, 1, 8, 64}, {}, {}},
      k{nullptr, DType::fp32, {batch, keys, 8, 64}, {}, {}};
  const Call made = make_explained({q, k, k}, options);
  return choose(made.problem, work(made), two_cores()).plan;
}

TEST(Plan, few_rows_split_their_keys_by_sizes_alone) {
  EXPECT_EQ(decoding(1, 8 * 512, {}).split_keys, 256);
  EXPECT_EQ(decoding(1, 64 * 512, {}).split_keys, 256);
  EXPECT_EQ(decoding(16, 64 * 512, {}).split_keys, 8 * 512);  // 128 kv heads make 1024 tasks
  EXPECT_EQ(decoding(128, 64 * 512, {}).split_keys, 0);
  EXPECT_EQ(decoding(1, 256, {}).split_keys, 0);
  EXPECT_EQ(decoding(1, 8 * 512, {.batch_invariant = true, .num_splits = 4}).split_keys, 0);
}

TEST(Plan, num_splits_is_kept_or_as_many_as_there_are_tiles) {
  EXPECT_EQ(decoding(1, 8 * 512, {.num_splits = 1}).split_keys, 0);
  EXPECT_EQ(decoding(8, 8 * 512, {.num_splits = 4}).split_keys, 2 * 512);
  EXPECT_EQ(decoding(8, 8 * 512, {.num_splits = 100}).split_keys, 256);
  Options threads{.num_splits = 2, .threads = 7};
  EXPECT_EQ(decoding(1, 8 * 512, threads).split_keys, 4 * 512);
}

TEST(Plan, up_to_32_rows_of_a_kv_head_read_its_keys_where_they_lie) {
  const auto plan = [](std::int64_t queries, std::int64_t group, const Options& options) {
    const Tensor q{nullptr, DType::bf16, {1, queries, 2 * group, 64}, {}, {}},
        k{nullptr, DType::bf16, {1, 4096, 2, 64}, {}, {}};
    const Call made = make_explained({q, k, k}, options);
    return choose(made.problem, work(made), two_cores()).plan;
  };
  EXPECT_TRUE(plan(1, 32, {}).reads_in_place);
  EXPECT_TRUE(plan(32, 1, {}).reads_in_place);
  EXPECT_FALSE(plan(33, 1, {}).reads_in_place);
  EXPECT_FALSE(plan(9, 4, {}).reads_in_place);
  EXPECT_FALSE(plan(1, 4, {.batch_invariant = true}).reads_in_place);
  EXPECT_THAT(plan(1, 4, {}).text(), testing::HasSubstr("keys read where they lie, kv heads together 2\n"));
  EXPECT_THAT(plan(1, 4, {.batch_invariant = true}).text(),
              testing::HasSubstr("batch_invariant: decoding takes the kernel of prefill\n"));
}

/// Rows of neighbours, as (b, s, hk, d) has them; up to 8 heads or 4 KiB of a key, and some tasks for each thread.
TEST(Plan, kv_heads_that_are_neighbours_in_memory_are_read_together) {
  const auto together = [](std::int64_t hk, std::int64_t keys, std::int64_t d, int threads,
                           bool heads_outside = false) {
    const Tensor q{nullptr, DType::fp32, {1, 1, hk, d}, {}, {}};
    Tensor k{nullptr, DType::fp32, {1, keys, hk, d}, {}, {}};
    if (heads_outside) k.strides = {hk * keys * d, d, keys * d, 1};
    const Call made = make_explained({q, k, k}, {.threads = threads});
    return choose(made.problem, work(made), two_cores()).plan.heads_together;
  };
  EXPECT_EQ(together(1, 32768, 64, 1), 1);
  EXPECT_EQ(together(3, 32768, 64, 1), 3);
  EXPECT_EQ(together(8, 32768, 64, 1), 8);
  EXPECT_EQ(together(11, 32768, 64, 1), 8);
  EXPECT_EQ(together(8, 32768, 256, 1), 4);
  EXPECT_EQ(together(8, 32768, 64, 1, true), 1);
  EXPECT_EQ(together(8, 32768, 64, 16), 8);  // 128 splits
  EXPECT_EQ(together(8, 4096, 64, 16), 2);   // 16 splits
  EXPECT_EQ(together(8, 256, 64, 16), 1);
}

TEST(Plan, prediction_takes_the_longer_of_arithmetic_and_memory) {
  const Prediction compute = predict(4e11, 1000, 2e11, 4e10);
  EXPECT_DOUBLE_EQ(compute.seconds, 2);
  EXPECT_EQ(compute.limited_by, "compute");
  const Prediction memory = predict(1000, 80'000'000'000, 2e11, 4e10);
  EXPECT_DOUBLE_EQ(memory.seconds, 2);
  EXPECT_EQ(memory.limited_by, "memory");
  EXPECT_EQ(predict(1, 1, 0, 4e10).seconds, 0);
}

/// Compute-bound calls on all the cores, each by the rate of what its kernels multiply.
TEST(Plan, prediction_takes_the_rate_of_the_operands) {
  const std::array<std::string_view, 2> sets{"amx", "avx512"};
  Machine machine = two_cores();
  machine.instruction_sets = sets;
  const auto flops_per_second = [&](DType dtype, bool dots) {
    machine.instruction_sets = std::span(sets).subspan(dots ? 0 : 1);
    const Tensor q{nullptr, dtype, {1, 4096, 4, 64}, {}, {}};
    const Call made = make_explained({q, q, q}, {});
    const Work cost = work(made);
    const Prediction prediction = choose(made.problem, cost, machine).plan.prediction;
    EXPECT_EQ(prediction.limited_by, "compute");
    return cost.flops / prediction.seconds;
  };
  EXPECT_DOUBLE_EQ(flops_per_second(DType::fp32, true), 2e11);
  EXPECT_DOUBLE_EQ(flops_per_second(DType::fp16, true), 2e11);
  EXPECT_DOUBLE_EQ(flops_per_second(DType::bf16, true), 8e11);
  EXPECT_DOUBLE_EQ(flops_per_second(DType::bf16, false), 2e11);
  EXPECT_DOUBLE_EQ(flops_per_second(DType::fp64, true), 1e11);
}

TEST(Plan, same_facts_same_plan) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 100; ++trial) {
    TestCall call = TestCall::dense();
    call.options.window.left = random() % 9;
    call.options.causal = trial % 2 ? Causal::bottom_right : Causal::none;
    EXPECT_EQ(choose_for(call, two_cores()).plan.text(), choose_for(call, two_cores()).plan.text());
  }
}

}  // namespace
}  // namespace narrows::test
