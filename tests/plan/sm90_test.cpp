// Plans of family sm90: what it refuses and why, tiles, thread blocks, scratch and programs.
#include "plan/sm90.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

#include "shared/tile_order.h"
#include "tests/plan/gpu_plan.hpp"

namespace narrows::test {
namespace {

const Machine& hopper() {
  static const Machine machine = [] {
    Machine made = cuda::machine_of("sm_90a");
    made.multiprocessors = 132;
    made.l2_bytes = 50 << 20;
    return made;
  }();
  return machine;
}

std::variant<Plan, Refusal> considered(const Call& call, const Machine& machine = hopper()) {
  return consider_sm90(call.problem, work(call), machine);
}

std::string refusal(const Call& call, const Machine& machine = hopper()) {
  const std::variant<Plan, Refusal> answer = considered(call, machine);
  return std::holds_alternative<Refusal>(answer) ? std::get<Refusal>(answer) : "";
}
std::string refusal(const GpuSizes& sizes, const Options& options = {}) {
  return refusal(make_explained(sizes.inputs(), options));
}

Plan plan(const GpuSizes& sizes, const Options& options = {}) {
  const std::variant<Plan, Refusal> answer = considered(make_explained(sizes.inputs(), options));
  if (const Refusal* reason = std::get_if<Refusal>(&answer)) throw std::runtime_error(*reason);
  return std::get<Plan>(answer);
}

TEST(Sm90Plan, is_preferred_where_it_takes_a_call) {
  Machine machine = hopper();
  machine.flops_per_second = 1e15;
  machine.bytes_per_second = 4e12;
  const auto chosen = [&](const GpuSizes& sizes, const Options& options = {}) {
    const Call call = make_explained(sizes.inputs(), options);
    return choose(call.problem, work(call), machine);
  };
  EXPECT_EQ(chosen({}).plan.family, "sm90");
  EXPECT_EQ(chosen({.sq = 1, .sk = 1}).plan.family, "sm90");
  EXPECT_EQ(chosen({.b = 8, .sq = 4096, .sk = 4096}).plan.family, "sm90");
  const Choice fallen = chosen({.d = 60});
  EXPECT_EQ(fallen.plan.family, "sm80");
  ASSERT_EQ(fallen.refused.size(), 1u);
  EXPECT_EQ(fallen.refused[0], "sm90: takes head dims that are multiples of 8 up to 256, not d=60 dv=64");
}

TEST(Sm90Plan, refuses_by_name_what_it_does_not_compute) {
  EXPECT_EQ(refusal(GpuSizes{}), "");
  EXPECT_EQ(refusal(GpuSizes{.dtype = DType::fp16, .d = 8, .dv = 256}), "");
  EXPECT_EQ(refusal(GpuSizes{.dtype = DType::fp32}), "takes bf16 and fp16, not fp32");
  EXPECT_EQ(refusal(GpuSizes{.d = 264}), "takes head dims that are multiples of 8 up to 256, not d=264 dv=64");
  EXPECT_EQ(refusal(GpuSizes{.dv = 68}), "takes head dims that are multiples of 8 up to 256, not d=64 dv=68");
  EXPECT_EQ(refusal(GpuSizes{.sk = 0}), "needs a key");
  const Inputs no_sequence{on_gpu(DType::bf16, {9, 4, 64}), on_gpu(DType::bf16, {0, 500, 2, 64}),
                           on_gpu(DType::bf16, {0, 500, 2, 64})};
  EXPECT_EQ(refusal(make_explained(no_sequence, {.cu_seqlens_q = on_gpu(DType::int32, {1})})), "needs a key")
      << "rows behind the last sequence, and an empty tensor that no map describes";
  EXPECT_EQ(refusal(GpuSizes{.b = 0}), "") << "has nothing to do";
  EXPECT_EQ(refusal(GpuSizes{}, {.num_splits = 3}), "does not split keys, num_splits=3");
  EXPECT_EQ(refusal(GpuSizes{}, {.chunk = 64}), "");
  EXPECT_EQ(refusal(GpuSizes{}, {.dropout = 0.5}), "has no dropout");
  EXPECT_EQ(refusal(GpuSizes{}, {.batch_invariant = true}),
            "does not read every layout, as batch_invariant asks of one kernel");
  Options options;
  options.bias = on_gpu(DType::bf16, {300, 500});
  EXPECT_EQ(refusal(GpuSizes{}, options), "has no bias");
  options = {};
  options.mask = on_gpu(DType::boolean, {300, 500});
  EXPECT_EQ(refusal(GpuSizes{}, options), "has no mask");
  for (Tensor Options::*bound : {&Options::key_begin, &Options::key_end}) {
    options = {};
    options.*bound = on_gpu(DType::int32, {2, 300});
    EXPECT_EQ(refusal(GpuSizes{}, options), "has no key_begin and key_end");
  }
  for (const Options& taken : {Options{.causal = Causal::top_left}, Options{.scale = -1}, Options{.scale = 0},
                               Options{.softcap = 3}, Options{.window = {3, 4}}})
    EXPECT_EQ(refusal(GpuSizes{}, taken), "");

  for (const char* architecture : {"sm_80", "sm_89", "sm_100", "sm_120"}) {
    const Machine machine = cuda::machine_of(architecture);
    EXPECT_EQ(refusal(make_explained(GpuSizes{}.inputs(), {}), machine),
              text("needs compute capability 9.0, the device has ", machine.compute_capability / 10, ".",
                   machine.compute_capability % 10));
  }
}

TEST(Sm90Plan, refuses_layouts_that_the_copy_engine_does_not_read) {
  const auto with_key = [](const Dims& strides, std::uintptr_t address = 1 << 20) {
    Inputs in = GpuSizes{}.inputs();
    in.k = on_gpu(DType::bf16, {2, 500, 2, 64}, strides, address);
    return refusal(make_explained(in, {}));
  };
  EXPECT_EQ(with_key({64000, 128, 64, 1}), "");
  EXPECT_EQ(with_key({64000, 64, 32000, 1}), "") << "(b, h, s, d) in memory";
  EXPECT_EQ(with_key({88000, 176, 72, 1}), "") << "with gaps";
  const std::string unaligned = "needs k with adjoining columns, and rows at multiples of 16 bytes";
  EXPECT_EQ(with_key({64000, 128, 64, 1}, (1 << 20) + 8), unaligned);
  EXPECT_EQ(with_key({66000, 132, 66, 1}), unaligned);
  EXPECT_EQ(with_key({128000, 256, 128, 2}), unaligned);
  EXPECT_EQ(with_key({64000, 128, 0, 1}), "reads no expanded k");
  EXPECT_EQ(with_key({-64000, 128, 64, 1}), "needs strides of k above 0 and below 2^40 bytes");
  EXPECT_EQ(with_key({i64{1} << 39, 128, 64, 1}), "needs strides of k above 0 and below 2^40 bytes");
  EXPECT_EQ(with_key({(i64{1} << 39) - 64, 128, 64, 1}), "");

  Inputs one = GpuSizes{.b = 1, .hk = 1}.inputs();
  one.k.strides = {-3, 64, 5, 1};
  EXPECT_EQ(refusal(make_explained(one, {})), "") << "strides of one element mean nothing";
  const Outputs out{on_gpu(DType::bf16, {2, 300, 4, 64}, {300 * 4 * 68, 4 * 68, 68, 1}, 1 << 21), {}};
  EXPECT_EQ(refusal(make_forward(GpuSizes{}.inputs(), out, {})),
            "needs o with adjoining columns, and rows at multiples of 16 bytes");
}

TEST(Sm90Plan, every_width_and_rule_has_tiles_that_fit) {
  const std::array<Options, 4> rules{Options{}, Options{.causal = Causal::bottom_right}, Options{.softcap = 3},
                                     Options{.scale = -1, .causal = Causal::bottom_right}};
  for (const DType dtype : {DType::bf16, DType::fp16})
    for (i64 d = 8; d <= 256; d += 8)
      for (const i64 dv : {8, 64, 96, 120, 192, 256})
        for (const i64 sk : {5, 2000, 9000})
          for (const Options& options : rules) {
            const Plan made = plan({.dtype = dtype, .sk = sk, .d = d, .dv = dv}, options);
            ASSERT_LE(made.shared_bytes, hopper().shared_bytes) << d << " " << dv;
            ASSERT_GE(made.head_width, d);
            ASSERT_GE(made.value_width, dv);
            ASSERT_EQ(made.query_block, 16 * made.warps);
            ASSERT_EQ(made.key_block % 16, 0);
          }
}

/// Registers of a multiprocessor: what a launch allocates, of which roles take different shares.
TEST(Sm90Plan, registers_of_all_warps_are_what_a_launch_has) {
  for (const i64 d : {64, 96, 128, 192, 256})
    for (const bool causal : {false, true})
      for (const double softcap : {0.0, 2.0}) {
        const Call call = make_explained(GpuSizes{.d = d, .dv = d}.inputs(),
                                         {.softcap = softcap, .causal = causal ? Causal::bottom_right : Causal::none});
        const ForwardSm90Constants constants = forward_sm90_constants(call.problem);
        const int warps = constants.warps + 4, launched = 65536 / (32 * warps) / 8 * 8;
        EXPECT_LE(32 * (4 * constants.bring_registers + constants.warps * constants.compute_registers),
                  32 * warps * launched);
        EXPECT_LE(constants.compute_registers, 255);
      }
}

TEST(Sm90Plan, tiles_of_short_causal_sequences_are_known_further_ahead) {
  const auto slots = [](i64 sk, const Options& options) {
    const Call call = make_explained(GpuSizes{.sk = sk, .d = 128, .dv = 128}.inputs(), options);
    return forward_sm90_constants(call.problem).fact_slots;
  };
  EXPECT_EQ(slots(1023, {.causal = Causal::bottom_right}), 3);
  EXPECT_EQ(slots(1024, {.causal = Causal::bottom_right}), 2);
  EXPECT_EQ(slots(300, {}), 2);
}

TEST(Sm90Plan, short_sequences_of_the_widest_heads_are_whole_blocks_of_keys) {
  for (const Causal causal : {Causal::none, Causal::bottom_right})
    for (const i64 sk : {512, 1023, 1024, 2047, 2048}) {
      const Call call = make_explained(GpuSizes{.sk = sk, .d = 256, .dv = 256}.inputs(), {.causal = causal});
      const ForwardSm90Constants constants = forward_sm90_constants(call.problem);
      const bool is_short = sk < (causal == Causal::none ? 1024 : 2048);
      EXPECT_EQ(constants.key_block, is_short ? 64 : 80) << sk;
      EXPECT_EQ(constants.own_output_tile, is_short) << "O leaves beside the next tile's beginning, in pieces";
    }
}

TEST(Sm90Plan, short_causal_sequences_of_64_columns_have_four_warpgroups_that_take_no_turns) {
  for (const Causal causal : {Causal::none, Causal::bottom_right})
    for (const i64 sk : {512, 2047, 2048}) {
      const ForwardSm90Constants constants =
          forward_sm90_constants(make_explained(GpuSizes{.sk = sk}.inputs(), {.causal = causal}).problem);
      const bool turns = causal == Causal::none || sk == 2048;
      EXPECT_EQ(constants.takes_turns, turns) << sk;
      EXPECT_EQ(constants.stages, turns ? 2 : 4) << sk;
      EXPECT_EQ(constants.query_block, turns ? 192 : 256) << sk;
      EXPECT_EQ(constants.key_block, turns ? 128 : 64) << sk;
    }
}

TEST(Sm90Plan, thread_blocks_stay_and_uneven_tiles_are_handed_out) {
  const GpuSizes many{.b = 8, .sq = 2048, .sk = 2048, .h = 16, .hk = 16, .d = 128, .dv = 128};
  const GpuSizes few{.b = 1, .sq = 256, .sk = 2048, .h = 2, .hk = 1, .d = 128, .dv = 128};
  const Options causal{.causal = Causal::bottom_right};
  EXPECT_EQ(plan(many).thread_blocks, 132);
  EXPECT_EQ(plan(many).workspace_bytes(), 0) << "tiles of one length";
  EXPECT_EQ(plan(many, causal).workspace_bytes(), 64);
  EXPECT_EQ(plan(few, causal).thread_blocks, 4);
  EXPECT_EQ(plan(few, causal).workspace_bytes(), 0) << "each thread block has one";
  EXPECT_EQ(plan(many).section, 1);
  EXPECT_EQ(plan(many, causal).section, 32) << "K and V of 1 MiB each, 64% of 50 MiB";
  Options used;
  used.seqused_k = on_gpu(DType::int32, {8});
  EXPECT_EQ(plan(many, used).workspace_bytes(), 64);
  EXPECT_EQ(forward_sm90_tiles(make_explained(many.inputs(), {}).problem, 128), 2048);
  const std::string words = plan(many, causal).text();
  EXPECT_NE(words.find("family sm90\n"), std::string::npos);
  EXPECT_NE(words.find("thread blocks that take tile after tile 132\n"), std::string::npos);
  EXPECT_NE(words.find("scratch tiles taken 64 bytes\n"), std::string::npos);
}

TEST(Sm90Plan, short_uneven_tiles_are_dealt_in_turn_where_all_get_as_much) {
  const auto of = [](i64 pairs, i64 rows) {
    return GpuSizes{.b = 1, .sq = rows, .sk = rows, .h = pairs, .hk = pairs, .d = 128, .dv = 128};
  };
  const Options causal{.causal = Causal::bottom_right};
  const auto expect = [&](const GpuSizes& sizes, bool in_turn, const char* why) {
    const Plan made = plan(sizes, causal);
    EXPECT_EQ(made.workspace_bytes(), in_turn ? 0 : 64) << why;
    EXPECT_EQ(made.section == 12, in_turn) << why;
    if (!in_turn) return;
    // Blocks of rows, longest last, that each thread block comes to.
    const i64 blocks = ceil_div<i64>(sizes.sq, made.query_block), tiles = blocks * sizes.h;
    std::vector<i64> work(static_cast<std::size_t>(made.thread_blocks));
    for (i64 n = 0; n < tiles; ++n)
      work[static_cast<std::size_t>(n % made.thread_blocks)] +=
          tile_number(static_cast<u32>(n), static_cast<u32>(blocks), static_cast<u32>(sizes.h), 12).block + 1;
    const double mean = static_cast<double>(sizes.h * blocks * (blocks + 1) / 2) / made.thread_blocks;
    EXPECT_LE(static_cast<double>(*std::max_element(work.begin(), work.end())), 1.07 * mean) << why;
  };
  expect(of(512, 512), true, "gcd(12 * 4, 132) is 12");
  expect(of(256, 1024), true, "");
  expect(of(128, 1024), true, "eight rounds, as many as blocks of rows");
  expect(of(32, 1024), false, "two rounds");
  expect(of(256, 1408), false, "11 blocks of rows: a thread block would have one of them alone");
  expect(of(256, 2048), false, "not measured");
  Options used = causal;
  used.seqused_k = on_gpu(DType::int32, {1});
  EXPECT_EQ(plan(of(512, 512), used).workspace_bytes(), 64);
}

TEST(Sm90Plan, planned_programs_differ_and_are_for_hopper) {
  std::set<std::string> configs;
  const std::vector<Program> programs = planned_forward_sm90_programs(hopper());
  for (const Program& program : programs) {
    EXPECT_EQ(program.function, "forward_sm90");
    EXPECT_TRUE(configs.insert(program.config).second);
  }
  EXPECT_EQ(programs.size(), 23u + 6 + 11) << "plain, in fp16, over caches";
  EXPECT_TRUE(planned_forward_sm90_programs(cuda::machine_of("sm_80")).empty());
  for (const i64 d : {64, 96, 128, 192, 256})
    for (const Options& options : {Options{}, Options{.causal = Causal::top_left}}) {
      const Call call = make_explained(GpuSizes{.d = d, .dv = d}.inputs(), options);
      EXPECT_TRUE(configs.count(forward_sm90_program(forward_sm90_constants(call.problem)).config)) << d;
    }
}

/// The instruction is told the registers of D, then of A, then the descriptor of B.
TEST(Sm90Plan, products_name_every_register_once) {
  const Call call = make_explained(GpuSizes{.d = 128, .dv = 128}.inputs(), {});
  const std::string config = forward_sm90_program(forward_sm90_constants(call.problem)).config;
  for (const char* part :
       {"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%0, %1, ", "%62, %63}, %64, %65, p, 1, 1, 0, 0;}",
        "%62, %63}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;}", "%62, %63}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;}",
        "\"+f\"(d[0][15][3])\n", "setp.ne.b32 p, %69, 0;"})
    EXPECT_NE(config.find(part), std::string::npos) << part;
  EXPECT_EQ(config.find("d[0][16]"), std::string::npos);
}

}  // namespace
}  // namespace narrows::test
