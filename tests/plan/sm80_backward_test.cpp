// Plans of family sm80 backward: what it refuses, tiles, scratch, and how few programs many problems need.
#include "plan/sm80_backward.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/plan/random_problems.hpp"

namespace narrows::test {
namespace {

constexpr std::array<i64, 8> kBackwardWidths{32, 64, 96, 128, 192, 256, 512, 576};

std::string backward_refusal(const Call& call, const Machine& machine = cuda::machine_of("sm_90a")) {
  const std::variant<Plan, Refusal> answer = consider(call, machine);
  return std::holds_alternative<Refusal>(answer) ? std::get<Refusal>(answer) : "";
}

Call sm80_backward_of(const GpuSizes& sizes, const Options& options = {}) {
  return make_explained_backward(sizes.inputs(), options);
}

Plan backward_plan(const GpuSizes& sizes, const Options& options = {},
                   const Machine& machine = cuda::machine_of("sm_90a")) {
  return plan_of(sm80_backward_of(sizes, options), machine);
}

TEST(Sm80BackwardPlan, refuses_by_name_what_it_does_not_compute) {
  EXPECT_EQ(backward_refusal(sm80_backward_of({})), "");
  EXPECT_EQ(backward_refusal(sm80_backward_of({.d = 576, .dv = 512})), "");
  EXPECT_EQ(backward_refusal(sm80_backward_of({}, {.num_splits = 3})), "does not split keys, num_splits=3");
  EXPECT_EQ(backward_refusal(sm80_backward_of({}, {.num_splits = 1})), "");
  Machine machine = cuda::machine_of("sm_80");
  machine.compute_capability = 75;
  EXPECT_EQ(backward_refusal(sm80_backward_of({}), machine), "needs compute capability 8.0, the device has 7.5");
  machine.compute_capability = 80;
  machine.shared_bytes = 16384;
  EXPECT_EQ(backward_refusal(sm80_backward_of({}), machine), "no tiles fit 16384 bytes of shared memory");
}

TEST(Sm80BackwardPlan, refuses_sizes_that_32_bits_do_not_hold) {
  constexpr i64 kMost = 2147482623;
  EXPECT_EQ(backward_refusal(sm80_backward_of({.b = 1, .sq = kMost, .sk = 1, .h = 1, .hk = 1})), "");
  EXPECT_EQ(backward_refusal(sm80_backward_of({.sq = kMost + 1})), "takes up to 2147482623 rows of a tensor");
  EXPECT_EQ(backward_refusal(sm80_backward_of({.sk = kMost + 1})), "takes up to 2147482623 rows of a tensor");
  const Plan plan = backward_plan({});
  const i64 rows = plan.query_block << 13, keys = plan.key_block << 13;  // 8192 blocks of each
  EXPECT_EQ(backward_refusal(sm80_backward_of({.b = 1 << 9, .sq = rows, .h = 1 << 9, .hk = 1})),
            "takes up to 2147482623 blocks of query rows, not 8192 of 262144 heads");
  EXPECT_EQ(backward_refusal(sm80_backward_of({.b = 1 << 9, .sq = 1, .sk = keys, .h = 1 << 9, .hk = 1 << 9})),
            "takes up to 2147482623 blocks of keys, not 8192 of 262144 heads");
  EXPECT_EQ(backward_refusal(sm80_backward_of({.b = 1 << 9, .sq = 1, .sk = keys, .h = 1 << 9, .hk = 1 << 8})), "");
}

TEST(Sm80BackwardPlan, counts_the_tiles_of_dbias) {
  Options options;
  options.bias = on_gpu(DType::fp32, {1, 4, 300, 500});
  const GpuSizes sizes{.b = 2, .sq = 300, .sk = 500, .h = 4, .hk = 2};
  Call call = sm80_backward_of(sizes, options);
  EXPECT_EQ(bias_blocks(call.problem, 64, 128), 4 * 5 * 4);
  EXPECT_EQ(backward_refusal(call), "");
  call.problem.dbias_sizes = {1, 1, i64{1} << 30, i64{1} << 30};
  EXPECT_EQ(backward_refusal(call).substr(0, 46), "takes up to 2147482623 tiles of dbias, not 281");
  options.bias = on_gpu(DType::fp32, {500});
  EXPECT_EQ(bias_blocks(sm80_backward_of(sizes, options).problem, 64, 128), 4);
  EXPECT_EQ(bias_blocks(sm80_backward_of(sizes).problem, 64, 128), 0);
}

void expect_backward_tiles(const Plan& plan, const Machine& machine, DType dtype) {
  EXPECT_LE(plan.shared_bytes + 1536, machine.shared_bytes) << "the kernel's own facts do not fit";
  EXPECT_EQ(plan.warps % plan.column_warps, 0);
  EXPECT_EQ(plan.key_block % (16 * (plan.warps / plan.column_warps)), 0) << "16 keys a warp";
  const i64 score_warps = std::min<i64>(plan.column_warps, plan.query_block / 16);  // of those that share keys
  EXPECT_EQ(plan.query_block % (8 * score_warps), 0) << "8 columns of S a warp";
  EXPECT_EQ(plan.query_block % 16, 0);
  const i64 item = static_cast<i64>(item_size(dtype));
  EXPECT_GE(plan.head_width * item, 32 * plan.column_warps) << "32 bytes of a row of dK a warp";
  EXPECT_GE(plan.value_width * item, 32 * plan.column_warps);
  EXPECT_TRUE(plan.stages == 1 || plan.stages == 2);
  EXPECT_GE(plan.head_width * static_cast<i64>(item_size(dtype)), 64);
}

/// fp32 of more than 256 columns needs more shared memory than GPUs of 99 KiB have.
bool may_be_refused(const Machine& machine, DType dtype, i64 width) {
  return dtype == DType::fp32 && width > 256 && machine.shared_bytes < (128 << 10);
}

TEST(Sm80BackwardPlan, every_width_and_rule_has_tiles_on_every_gpu) {
  std::array<Options, 5> rules;
  rules[1].softcap = 30;
  rules[2].bias = on_gpu(DType::bf16, {300, 500});
  rules[3].dropout = 0.1;
  rules[4].mask = on_gpu(DType::boolean, {300, 500});
  for (const std::string_view architecture : kGpuArchitectures)
    for (const DType dtype : kGpuDTypes)
      for (const i64 d : kBackwardWidths)
        for (const i64 dv : kBackwardWidths)
          for (const Options& options : rules) {
            if (dv > 512) continue;
            SCOPED_TRACE(text(architecture, " ", dtype, " d=", d, " dv=", dv));
            const Machine machine = cuda::machine_of(architecture);
            const Call call = sm80_backward_of({.dtype = dtype, .d = d, .dv = dv}, options);
            if (const std::string reason = backward_refusal(call, machine); !reason.empty()) {
              EXPECT_TRUE(may_be_refused(machine, dtype, std::max(d, dv))) << reason;
              continue;
            }
            const Plan plan = plan_of(call, machine);
            EXPECT_GE(plan.head_width, d);
            EXPECT_GE(plan.value_width, dv);
            EXPECT_LE(std::max(plan.head_width, plan.value_width), std::max(d, dv)) << "the row of the table";
            EXPECT_EQ(plan.vector_sums, machine.compute_capability >= 90);
            expect_backward_tiles(plan, machine, dtype);
          }
}

TEST(Sm80BackwardPlan, shared_memory_by_hand) {
  BackwardConstants c;
  c.head_width = 128;
  c.value_width = 64;
  c.query_block = 64;
  c.key_block = 128;
  c.stages = 2;
  // K 128 x 256, V 128 x 128; two stages of Q 64 x 256 and dO 64 x 128; two tiles of dS 128 x 128; 16 bytes a row and stage.
  EXPECT_EQ(backward_shared_bytes(c), 32768 + 16384 + 2 * (16384 + 8192) + 2 * 16384 + 2 * 64 * 16);
  c.query_block = 16;
  c.stages = 1;
  c.column_warps = 2;
  EXPECT_EQ(backward_shared_bytes(c), 32768 + 16384 + 4096 + 2048 + 2 * 128 * 64 + 16 * 16)
      << "rows of 64 bytes at least";
  c.element = Element::fp32;
  EXPECT_EQ(backward_shared_bytes(c), 65536 + 32768 + 8192 + 4096 + 2 * 128 * 64 + 16 * 16);
}

i64 scratch_of(const Plan& plan, Sm80Region region) { return plan.workspace[static_cast<std::size_t>(region)].bytes; }

i64 whole_units(i64 bytes) { return (bytes + 63) / 64 * 64; }

TEST(Sm80BackwardPlan, scratch_is_linear_in_the_rows) {
  const GpuSizes sizes{.b = 2, .sq = 300, .sk = 500, .h = 4, .hk = 2, .d = 100, .dv = 64};
  const Plan plan = backward_plan(sizes);
  const i64 blocks = 8 * ((300 + plan.query_block - 1) / plan.query_block), rows = blocks * plan.query_block;
  EXPECT_EQ(scratch_of(plan, Sm80Region::rows), rows * 8);
  EXPECT_EQ(scratch_of(plan, Sm80Region::query_sums), rows * 128 * 4) << "columns as they lie on chip";
  EXPECT_EQ(scratch_of(plan, Sm80Region::slope_sums), 0);
  EXPECT_EQ(scratch_of(plan, Sm80Region::sink_sums), 0);
  EXPECT_EQ(scratch_of(plan, Sm80Region::turns), 0);
  GpuSizes longer = sizes;
  longer.sk = 500000;
  EXPECT_EQ(backward_plan(longer).workspace_bytes(), plan.workspace_bytes());

  EXPECT_EQ(scratch_of(backward_plan(sizes, {.deterministic = true}), Sm80Region::turns),
            whole_units((blocks * plan.warps + 1) * 4))
      << "each warp of each block, and a counter";
  Options options;
  options.alibi_slopes = on_gpu(DType::fp32, {4});
  options.sinks = on_gpu(DType::fp32, {4});
  const Plan ruled = backward_plan(sizes, options);
  EXPECT_EQ(scratch_of(ruled, Sm80Region::slope_sums),
            whole_units(8 * ((500 + ruled.key_block - 1) / ruled.key_block) * 4));
  EXPECT_EQ(scratch_of(ruled, Sm80Region::sink_sums), whole_units(blocks * 4));

  Call some = sm80_backward_of(sizes);
  some.problem.wants_dq = false;
  EXPECT_EQ(scratch_of(plan_of(some, cuda::machine_of("sm_90a")), Sm80Region::query_sums), 0);
}

TEST(Sm80BackwardPlan, scratch_of_varlen_rows) {
  Inputs in{on_gpu(DType::bf16, {200, 4, 64}), on_gpu(DType::bf16, {260, 2, 64}), on_gpu(DType::bf16, {260, 2, 64})};
  Options options;
  options.cu_seqlens_q = options.cu_seqlens_k = on_gpu(DType::int32, {4});
  options.alibi_slopes = on_gpu(DType::fp32, {3, 4});
  const Call call = make_explained_backward(in, options);
  // 200 rows are 3 whole blocks of 64, and a sequence more has one to spare; 260 keys are 2 of 128.
  const Sm80BackwardBlocks blocks = backward_blocks(call.problem, 64, 128);
  EXPECT_EQ(blocks.query_blocks, 7);
  EXPECT_EQ(blocks.key_blocks, 6);
  EXPECT_EQ(blocks.query_pairs, 4);
  EXPECT_EQ(blocks.key_pairs, 2);
  EXPECT_EQ(backward_turns(call.problem, 64, 8), 4 * 7 * 8);
  const Plan plan = plan_of(call, cuda::machine_of("sm_90a"));
  const Sm80BackwardBlocks planned = backward_blocks(call.problem, plan.query_block, plan.key_block);
  EXPECT_EQ(scratch_of(plan, Sm80Region::rows), 4 * planned.query_blocks * plan.query_block * 8);
  EXPECT_EQ(scratch_of(plan, Sm80Region::slope_sums), whole_units(4 * planned.key_blocks * 4));
}

TEST(Sm80BackwardPlan, deterministic_and_batch_invariant_calls_take_turns) {
  EXPECT_FALSE(backward_plan({}).takes_turns);
  EXPECT_TRUE(backward_plan({}, {.deterministic = true}).takes_turns);
  EXPECT_TRUE(backward_plan({}, {.batch_invariant = true}).takes_turns);
}

TEST(Sm80BackwardPlan, sections_hold_rows_of_masked_calls_in_l2) {
  Machine machine = cuda::machine_of("sm_90a");
  machine.l2_bytes = 50 << 20;
  // Of a kv head 4 x 1024 rows with 2 x 256 bytes of Q and dO and 512 of sums: 4 MiB; 64% of L2 is 32 MiB.
  const GpuSizes sizes{.b = 4, .sq = 1024, .sk = 1024, .h = 32, .hk = 8, .d = 128, .dv = 128};
  EXPECT_EQ(backward_plan(sizes, {}, machine).section, 1);
  EXPECT_EQ(backward_plan(sizes, {.causal = Causal::bottom_right}, machine).section, 8);
  EXPECT_EQ(backward_plan(sizes, {.window = {100, -1}}, machine).section, 8);
  machine.l2_bytes = 60 << 20;  // 9 at a time
  EXPECT_EQ(backward_plan(sizes, {.causal = Causal::bottom_right}, machine).section, 8) << "as many each time";
  GpuSizes none = sizes;
  none.sq = 0;
  EXPECT_EQ(backward_plan(none, {.causal = Causal::bottom_right}, machine).section, 1);
}

TEST(Sm80BackwardPlan, what_is_read_narrows_copies_and_gradients_do_not) {
  const GpuSizes sizes{};
  const Inputs in = sizes.inputs();
  const auto at = [](int place, const Dims& strides = {}) {
    return on_gpu(DType::bf16, {2, 300, 4, 64}, strides, static_cast<std::uintptr_t>(place) << 24);
  };
  const auto keys_at = [](int place) {
    return on_gpu(DType::bf16, {2, 500, 2, 64}, {}, static_cast<std::uintptr_t>(place) << 24);
  };
  const Tensor lse = on_gpu(DType::fp32, {2, 4, 300}, {}, 3 << 24);
  const Dims apart{300 * 4 * 68, 4 * 68, 68, 1};
  const auto bytes = [&](const Tensor& dout, const Tensor& dq) {
    const Call call =
        make_backward({in.q, in.k, in.v, at(2), lse, dout, {}}, {dq, keys_at(6), keys_at(7), {}, {}, {}}, {});
    return plan_of(call, cuda::machine_of("sm_90a")).copy_bytes;
  };
  EXPECT_EQ(bytes(at(4), at(5)), 16);
  EXPECT_EQ(bytes(at(4, apart), at(5)), 8);
  EXPECT_EQ(bytes(at(4), at(5, apart)), 16);
  EXPECT_EQ(bytes(at(4, {0, 0, 0, 0}), at(5)), 0);
}

TEST(Sm80BackwardPlan, ten_thousand_problems_of_a_kind_need_at_most_six_programs) {
  constexpr std::array kKinds{
      ProgramKind{"plain", DType::bf16, 128, 128}, ProgramKind{"two widths", DType::fp16, 192, 128},
      ProgramKind{"plain", DType::fp32, 96, 96},
      ProgramKind{
          .name = "deterministic", .dtype = DType::bf16, .head_width = 64, .value_width = 64, .deterministic = true},
      ProgramKind{.name = "all",
                  .dtype = DType::bf16,
                  .head_width = 32,
                  .value_width = 64,
                  .softcap = true,
                  .alibi = true,
                  .bias = true,
                  .mask = true,
                  .dropout = true}};
  for (const std::string_view architecture : {"sm_86", "sm_90a"})
    for (const ProgramKind& kind : kKinds) {
      SCOPED_TRACE(text(architecture, " ", kind.name, " ", kind.dtype, " ", kind.head_width, " ", kind.value_width));
      const Machine machine = cuda::machine_of(architecture);
      RandomProblems problems(kind);
      std::vector<BackwardConstants> found;
      for (int i = 0; i < 10000; ++i) {
        const Call call = problems.next(Operation::backward);
        const BackwardConstants constants = backward_constants(call.problem, plan_of(call, machine));
        if (std::find(found.begin(), found.end(), constants) == found.end()) found.push_back(constants);
      }
      EXPECT_EQ(found.size(), kind.dtype == DType::fp32 ? 4u : 5u) << "one for each way to copy";
      for (const BackwardConstants& constants : found) EXPECT_EQ(constants.deterministic, kind.deterministic);
      for (const BackwardKernel kernel : {BackwardKernel::rows, BackwardKernel::queries, BackwardKernel::sums}) {
        std::set<std::string> texts;
        for (const BackwardConstants& constants : found)
          texts.insert(backward_program(kernel, constants_of(kernel, constants)).config);
        EXPECT_LE(texts.size(), kernel == BackwardKernel::sums ? 1u : found.size());
      }
    }
}

TEST(Sm80BackwardPlan, calls_share_the_programs_of_kernels_that_do_not_see_their_difference) {
  const auto program = [](BackwardKernel kernel, const GpuSizes& sizes, const Options& options = {}) {
    const Call call = sm80_backward_of(sizes, options);
    const BackwardConstants all = backward_constants(call.problem, plan_of(call, cuda::machine_of("sm_90a")));
    return backward_program(kernel, constants_of(kernel, all)).config;
  };
  const GpuSizes plain{.d = 128, .dv = 128};
  const Options deterministic{.deterministic = true};
  const auto same = [&](BackwardKernel kernel, const GpuSizes& sizes, const Options& options = {}) {
    return program(kernel, plain) == program(kernel, sizes, options);
  };
  EXPECT_FALSE(same(BackwardKernel::rows, {.d = 96, .dv = 128})) << "it clears the sums";
  EXPECT_FALSE(same(BackwardKernel::rows, {.d = 128, .dv = 96}));
  EXPECT_TRUE(same(BackwardKernel::rows, plain, deterministic));
  EXPECT_FALSE(same(BackwardKernel::rows, plain, {.scale = -1}));
  EXPECT_TRUE(same(BackwardKernel::queries, {.d = 128, .dv = 96}));
  EXPECT_FALSE(same(BackwardKernel::queries, {.d = 96, .dv = 128}));
  EXPECT_TRUE(same(BackwardKernel::queries, plain, {.scale = -1}));
  EXPECT_TRUE(same(BackwardKernel::sums, {.d = 64, .dv = 96}));
  EXPECT_FALSE(same(BackwardKernel::keys, plain, deterministic));
  EXPECT_TRUE(same(BackwardKernel::bias, plain, deterministic));
  EXPECT_FALSE(same(BackwardKernel::keys, {.dtype = DType::fp16, .d = 128, .dv = 128}));
}

TEST(Sm80BackwardPlan, the_planned_set_is_small_and_has_each_program_once) {
  for (const std::string_view architecture : {"sm_80", "sm_86", "sm_90a"}) {
    const std::vector<Program> programs = planned_backward_programs(cuda::machine_of(architecture));
    std::set<std::pair<std::string_view, std::string>> found;
    std::set<std::string_view> functions;
    for (const Program& program : programs) {
      found.insert({program.function, program.config});
      functions.insert(program.function);
      EXPECT_EQ(program.source, text(program.function, ".cu"));
    }
    EXPECT_EQ(found.size(), programs.size());
    EXPECT_EQ(functions.size(), 5u);
    EXPECT_LE(programs.size(), 60u) << architecture;
  }
}

TEST(Sm80BackwardPlan, says_its_decisions) {
  const Plan plan =
      backward_plan({.b = 2, .sq = 64, .sk = 500, .h = 4, .hk = 2, .d = 256, .dv = 200}, {.deterministic = true});
  const std::string tiles =
      text("family sm80\nquery block ", plan.query_block, "\nkey block ", plan.key_block,
           "\nhead dims on chip 256, 256\nwarps ", plan.warps, "\nthread blocks of a multiprocessor ",
           plan.resident_blocks, "\nshared memory of a thread block ", plan.shared_bytes,
           " bytes\nwarps that share keys ", plan.column_warps, "\nstages of Q and dO ", plan.stages,
           "\nsums of dQ in the order of keys\ncopied 16 bytes at a time\nheads together 4\nscratch facts of rows 4096 "
           "bytes\n");
  EXPECT_EQ(plan.text().substr(0, tiles.size()), tiles);
  EXPECT_GT(plan.column_warps, 1);
  Call gathered = sm80_backward_of({});
  gathered.problem.q.alignment = 2;
  EXPECT_NE(plan_of(gathered, cuda::machine_of("sm_90a")).text().find("\ncopied element by element\n"),
            std::string::npos);
}

}  // namespace
}  // namespace narrows::test
