// Backward plans of family sm90: what it refuses and why, tiles, registers, scratch and programs.
#include "plan/sm90_backward.hpp"

#include <gtest/gtest.h>

#include <set>

#include "plan/sm80_backward.hpp"
#include "tests/plan/gpu_plan.hpp"

namespace narrows::test {
namespace {

constexpr i64 kRegistersOfBlock = 168 * 3;  // of three warpgroups' threads, one each
constexpr i64 kRegistersBesideTurns = 128 * 4 - 32;
constexpr i64 kRegistersOfWideBlock = 128 * 3;  // of those of four that do not keep what they were launched with

const Machine& hopper_backward() {
  static const Machine machine = [] {
    Machine made = cuda::machine_of("sm_90a");
    made.multiprocessors = 132;
    made.l2_bytes = 50 << 20;
    return made;
  }();
  return machine;
}

std::variant<Plan, Refusal> considered_backward(const Call& call, const Machine& machine = hopper_backward()) {
  return consider_sm90(call.problem, work(call), machine);
}

std::string backward_refusal_of(const Call& call, const Machine& machine = hopper_backward()) {
  const std::variant<Plan, Refusal> answer = considered_backward(call, machine);
  return std::holds_alternative<Refusal>(answer) ? std::get<Refusal>(answer) : "";
}
std::string backward_refusal_of(const GpuSizes& sizes, const Options& options = {}) {
  return backward_refusal_of(make_explained_backward(sizes.inputs(), options));
}

Plan backward_plan(const GpuSizes& sizes, const Options& options = {}) {
  const std::variant<Plan, Refusal> answer = considered_backward(make_explained_backward(sizes.inputs(), options));
  if (const Refusal* reason = std::get_if<Refusal>(&answer)) throw std::runtime_error(*reason);
  return std::get<Plan>(answer);
}

BackwardSm90Constants constants_for(const GpuSizes& sizes, const Options& options = {}) {
  return backward_sm90_constants(make_explained_backward(sizes.inputs(), options).problem);
}

TEST(PlanSm90Backward, is_preferred_where_it_takes_a_call) {
  Machine machine = hopper_backward();
  machine.flops_per_second = 1e15;
  machine.bytes_per_second = 4e12;
  const auto chosen = [&](const GpuSizes& sizes, const Options& options = {}) {
    const Call call = make_explained_backward(sizes.inputs(), options);
    return choose(call.problem, work(call), machine);
  };
  EXPECT_EQ(chosen({}).plan.family, "sm90");
  EXPECT_EQ(chosen({.b = 8, .sq = 4096, .sk = 4096, .d = 128, .dv = 128}).plan.family, "sm90");
  EXPECT_EQ(chosen({.b = 8, .sq = 4096, .sk = 4096, .d = 96, .dv = 96}).plan.family, "sm90");
  EXPECT_EQ(chosen({.b = 8, .sq = 4096, .sk = 4096, .d = 16, .dv = 16}).plan.family, "sm80") << "mostly padding";
  for (const i64 d : {136, 192, 256})
    for (const i64 dv : {8, 64, 128, 256})
      for (const i64 rows : {1, 64, 4096}) {
        EXPECT_EQ(chosen({.b = 8, .sq = rows, .sk = 4096, .d = d, .dv = dv}).plan.family, "sm90") << d << " " << dv;
        EXPECT_EQ(chosen({.sq = rows, .sk = rows, .d = dv, .dv = d}).plan.family, "sm90") << dv << " " << d;
      }
  const Choice fallen = chosen({.d = 264});
  EXPECT_EQ(fallen.plan.family, "sm80");
  ASSERT_EQ(fallen.refused.size(), 1u);
  EXPECT_EQ(fallen.refused[0], "sm90: takes head dims that are multiples of 8 up to 256, not d=264 dv=64");
}

TEST(PlanSm90Backward, refuses_by_name_what_it_does_not_compute) {
  EXPECT_EQ(backward_refusal_of(GpuSizes{}), "");
  EXPECT_EQ(backward_refusal_of(GpuSizes{.dtype = DType::fp16, .d = 8, .dv = 128}), "");
  EXPECT_EQ(backward_refusal_of(GpuSizes{.dtype = DType::fp32}), "takes bf16 and fp16, not fp32");
  EXPECT_EQ(backward_refusal_of(GpuSizes{.d = 60}),
            "takes head dims that are multiples of 8 up to 256, not d=60 dv=64");
  EXPECT_EQ(backward_refusal_of(GpuSizes{.sq = 0}), "needs a query row");
  EXPECT_EQ(backward_refusal_of(GpuSizes{.sk = 0}), "needs a key");
  const Inputs no_sequence{on_gpu(DType::bf16, {0, 300, 4, 64}), on_gpu(DType::bf16, {9, 2, 64}),
                           on_gpu(DType::bf16, {9, 2, 64})};
  EXPECT_EQ(backward_refusal_of(make_explained_backward(no_sequence, {.cu_seqlens_k = on_gpu(DType::int32, {1})})),
            "needs a query row")
      << "rows of k behind the last sequence, and an empty tensor that no map describes";
  EXPECT_EQ(backward_refusal_of(GpuSizes{}, {.dropout = 0.5}), "has no dropout");
  EXPECT_EQ(backward_refusal_of(GpuSizes{}, {.batch_invariant = true}),
            "does not read every layout, as batch_invariant asks of one kernel");
  Options options;
  options.bias = on_gpu(DType::bf16, {300, 500});
  EXPECT_EQ(backward_refusal_of(GpuSizes{}, options), "has no bias");
  options = {};
  options.key_end = on_gpu(DType::int32, {2, 300});
  EXPECT_EQ(backward_refusal_of(GpuSizes{}, options), "has no key_begin and key_end");
  for (const Options& taken : {Options{.causal = Causal::top_left}, Options{.scale = -1}, Options{.softcap = 3},
                               Options{.chunk = 64}, Options{.window = {3, 4}}, Options{.deterministic = true}})
    EXPECT_EQ(backward_refusal_of(GpuSizes{}, taken), "");
  const Call call = make_explained_backward(GpuSizes{}.inputs(), {});
  EXPECT_EQ(backward_refusal_of(call, cuda::machine_of("sm_100")), "needs compute capability 9.0, the device has 10.0");
}

TEST(PlanSm90Backward, refuses_layouts_that_the_copy_engine_does_not_read) {
  Inputs in = GpuSizes{}.inputs();
  in.v = on_gpu(DType::bf16, {2, 500, 2, 64}, {66000, 132, 66, 1});
  EXPECT_EQ(backward_refusal_of(make_explained_backward(in, {})),
            "needs v with adjoining columns, and rows at multiples of 16 bytes");
}

TEST(PlanSm90Backward, what_a_thread_block_takes_fits) {
  for (const i64 d : {8, 64, 72, 128, 136, 192, 200, 256})
    for (const i64 dv : {8, 64, 72, 128, 192, 256})
      for (const bool deterministic : {false, true}) {
        const GpuSizes sizes{.d = d, .dv = dv};
        const BackwardSm90Constants constants = constants_for(sizes, {.deterministic = deterministic});
        const Plan plan = backward_plan(sizes, {.deterministic = deterministic});
        EXPECT_GE(plan.head_width, d);
        EXPECT_GE(plan.value_width, dv);
        // Behind the 1024 bytes before tiles.
        EXPECT_LE(plan.shared_bytes, hopper_backward().shared_bytes - 1024);
        const i64 registers = constants.sum_registers + 2 * constants.key_registers;
        EXPECT_LE(registers, constants.cluster == 2 ? kRegistersOfWideBlock
                             : deterministic        ? kRegistersBesideTurns
                                                    : kRegistersOfBlock);
        EXPECT_EQ(constants.cluster, std::max(d, dv) <= 128 ? 1 : 2);
        if (constants.cluster == 2) {
          EXPECT_GE(std::min(plan.head_width, plan.value_width), 128) << "columns are shared by two";
        }
        EXPECT_EQ(plan.takes_turns, deterministic);
        EXPECT_EQ(constants.takes_turns, constants.cluster == 1 && std::max(d, dv) > 64) << "of warpgroups";
      }
}

TEST(PlanSm90Backward, scratch_follows_tokens) {
  const GpuSizes sizes{.sq = 3000, .sk = 3000, .d = 128, .dv = 128};
  GpuSizes twice = sizes;
  twice.sq = twice.sk = 6000;
  const i64 once = backward_plan(sizes).workspace_bytes();
  EXPECT_GE(once, 2 * 4 * 3000 * 128 * 4);
  EXPECT_LT(backward_plan(twice).workspace_bytes(), 2 * once + 1024);
}

TEST(PlanSm90Backward, programs) {
  const std::vector<Program> programs = planned_backward_sm90_programs(hopper_backward());
  std::set<std::string> configs;
  for (const Program& program : programs) {
    const bool wide = program.config.find("kCluster = 2") != program.config.npos;
    EXPECT_EQ(program.source, wide ? "backward_wide_sm90.cu" : "backward_sm90.cu");
    EXPECT_EQ(program.function, wide ? "backward_wide_sm90" : "backward_sm90");
    EXPECT_FALSE(program.exact_math);
    EXPECT_TRUE(configs.insert(program.config).second);
  }
  EXPECT_EQ(programs.size(), 4u * 5 + 3);
  EXPECT_TRUE(planned_backward_sm90_programs(cuda::machine_of("sm_89")).empty());
  for (const i64 d : {64, 128, 192, 256})
    for (const Options& options : {Options{}, Options{.causal = Causal::top_left}, Options{.deterministic = true}})
      EXPECT_TRUE(configs.count(backward_sm90_program(constants_for({.d = d, .dv = d}, options)).config)) << d;
}

TEST(PlanSm90Backward, products) {
  const std::string config =
      backward_sm90_program(constants_for({.d = 128, .dv = 128}, {.deterministic = true})).config;
  // dQ: both operands' sums run down columns. dV and dK of one width are one function.
  EXPECT_NE(config.find("inline void multiply_gradients(float (&d)[1][8][4], u64 a, u64 b, int adds)"), config.npos);
  EXPECT_NE(config.find("p, 1, 1, 1, 1;}"), config.npos);
  const std::size_t sums = config.find("inline void multiply_sums(");
  ASSERT_NE(sums, config.npos);
  EXPECT_EQ(config.find("inline void multiply_sums(", sums + 1), config.npos);
  EXPECT_NE(config.find("constexpr bool kDeterministic = true;"), config.npos);
}

TEST(PlanSm90Backward, stages_of_wide_heads_are_what_shared_memory_has) {
  const auto stages = [](i64 d, i64 dv) { return constants_for({.d = d, .dv = dv}).output_stages; };
  EXPECT_EQ(stages(256, 256), 1);
  EXPECT_EQ(stages(192, 192), 2);
  EXPECT_EQ(stages(192, 128), 2);
  EXPECT_EQ(stages(256, 64), 2);
  const Plan plan = backward_plan({.d = 192, .dv = 64});
  EXPECT_EQ(plan.value_width, 128);
  EXPECT_EQ(plan.shared_bytes, (64 * (192 + 128) + 64 * 128) * 2     // K, V, of the other's K
                                   + 2 * 64 * ((192 + 128) * 2 + 8)  // two stages of Q, dO and facts
                                   + 6 * 64 * 64 * 2                 // P, dS and the other's dS, twice
                                   + 256 + 8 * 64 + 176);
}

TEST(PlanSm90Backward, products_of_wide_heads) {
  const std::string config = backward_sm90_program(constants_for({.d = 256, .dv = 256})).config;
  for (const int tiles : {8, 16})
    EXPECT_NE(config.find(text("inline void multiply_sums(float (&d)[1][", tiles, "][4], u64 a, u64 b, int adds)")),
              config.npos);
}

TEST(PlanSm90Backward, kernels_around_it) {
  const Call call = make_explained_backward(GpuSizes{}.inputs(), {});
  const Plan plan = backward_plan({});
  const BackwardConstants around = backward_constants(call.problem, plan);
  const Program rows = backward_program(BackwardKernel::rows, constants_of(BackwardKernel::rows, around));
  EXPECT_NE(rows.config.find("constexpr bool kFactsApart = true;"), rows.config.npos);
  const Program queries = backward_program(BackwardKernel::queries, constants_of(BackwardKernel::queries, around));
  EXPECT_NE(queries.config.find("constexpr bool kVectorSums = true;"), queries.config.npos);
  EXPECT_NE(queries.config.find(text("constexpr int kBlockQueries = ", plan.query_block, ";")), queries.config.npos);
}

}  // namespace
}  // namespace narrows::test
