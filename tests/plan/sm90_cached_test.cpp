// Plans of family sm90 for prompts over KV caches: what is taken and refused, where the copy engine brings keys and where they are
// gathered, which family computes how many query rows.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "plan/sm90.hpp"
#include "tests/plan/gpu_plan.hpp"

namespace narrows::test {
namespace {

struct PromptSizes {
  DType dtype = DType::bf16;
  i64 b = 2, sq = 512, slots = 4096, h = 32, hk = 8, d = 128, dv = 128;
  i64 page = 0;  // 0: contiguous
  bool padded = false, varlen = false;
  std::uintptr_t address = 1 << 20;

  Call call(Options options = {}) const {
    const Dims k = page ? Dims{b * slots / page, page, hk, d} : Dims{b, slots, hk, d};
    const Dims q = varlen ? Dims{b * sq, h, d} : Dims{b, sq, h, d};
    options.cache_seqlens = on_gpu(DType::int32, {b});
    if (page) options.block_table = on_gpu(DType::int32, {b, slots / page});
    if (padded) options.leftpad = on_gpu(DType::int32, {b});
    if (varlen) options.cu_seqlens_q = on_gpu(DType::int32, {b + 1});
    const Inputs in{on_gpu(dtype, q, {}, address), on_gpu(dtype, k, {}, address),
                    on_gpu(dtype, {k[0], k[1], hk, dv}, {}, address)};
    return make_explained(in, options);
  }
};

Machine h200() {
  Machine machine = cuda::machine_of("sm_90a");
  machine.multiprocessors = 132;
  machine.l2_bytes = 50 << 20;
  machine.flops_per_second = 1.07e15;
  machine.bytes_per_second = 4.9e12;
  return machine;
}

std::string refusal(const PromptSizes& sizes, const Options& options = {}) {
  const Call call = sizes.call(options);
  const std::variant<Plan, Refusal> answer = consider_sm90(call.problem, work(call), h200());
  return std::holds_alternative<Refusal>(answer) ? std::get<Refusal>(answer) : "";
}

Plan chosen(const PromptSizes& sizes, const Options& options = {}) {
  const Call call = sizes.call(options);
  return choose(call.problem, work(call), h200()).plan;
}

TEST(Sm90CachedPlan, many_query_rows_are_its_own_and_few_are_packed_by_the_other) {
  for (const i64 page : {0, 1, 16, 256})
    for (const bool varlen : {false, true}) {
      for (const i64 sq : {128, 512, 2048}) {
        const Plan plan = chosen({.sq = sq, .page = page, .varlen = varlen});
        EXPECT_EQ(plan.family, "sm90") << sq << " rows, pages of " << page;
        EXPECT_FALSE(plan.decodes);
        EXPECT_EQ(plan.workspace_bytes(), plan.thread_blocks == 132 ? 64 : 0)
            << "lengths on the device: tiles are handed out";
      }
      for (const i64 b : {1, 64})
        for (const i64 sq : {1, 4}) {
          const Plan plan = chosen({.b = b, .sq = sq, .slots = 8192, .page = page, .varlen = varlen});
          EXPECT_EQ(plan.family, "sm80") << sq << " rows, pages of " << page;
          EXPECT_TRUE(plan.decodes);
        }
    }
}

TEST(Sm90CachedPlan, families_change_where_their_measured_times_cross) {
  for (const i64 page : {0, 16})
    for (const i64 sq : {4, 16, 20, 24, 32, 64}) {
      const PromptSizes sizes{.b = 16, .sq = sq, .page = page};
      EXPECT_EQ(chosen(sizes, {.causal = Causal::bottom_right}).family, sq <= 16 ? "sm80" : "sm90") << sq;
    }
}

TEST(Sm90CachedPlan, refuses_by_name_what_it_does_not_compute) {
  EXPECT_EQ(refusal({}), "");
  EXPECT_EQ(refusal({.page = 1, .padded = true, .varlen = true}), "");
  EXPECT_EQ(refusal({}, {.softcap = 3, .causal = Causal::bottom_right, .window = {100, -1}, .chunk = 9}), "");
  EXPECT_EQ(refusal({.sq = 1}, {.num_splits = 1}), "");
  EXPECT_EQ(refusal({}, {.num_splits = 2}), "does not split keys, num_splits=2");
  EXPECT_EQ(refusal({}, {.batch_invariant = true}),
            "does not read every layout, as batch_invariant asks of one kernel");
  EXPECT_EQ(refusal({.dtype = DType::fp32}), "takes bf16 and fp16, not fp32");
  EXPECT_EQ(refusal({.d = 100}), "takes head dims that are multiples of 8 up to 256, not d=100 dv=128");
  EXPECT_EQ(refusal({.address = (1 << 20) + 8}), "needs q with adjoining columns, and rows at multiples of 16 bytes");
  EXPECT_EQ(refusal({.slots = 0}), "needs a key");
  Options options;
  options.rotary_cos = options.rotary_sin = on_gpu(DType::fp32, {8192, 64});
  EXPECT_EQ(refusal({}, options), "turns no queries by their positions");
}

TEST(Sm90CachedPlan, a_call_that_appends_to_pages_marks_sequences_that_it_refuses) {
  Options options;
  options.k_new = options.v_new = on_gpu(DType::bf16, {2, 512, 8, 128});
  const auto marks = [&](i64 page) {
    const Plan plan = chosen({.page = page}, options);
    EXPECT_EQ(plan.family, "sm90");
    EXPECT_EQ(plan.blocks, 132);
    return plan.workspace[static_cast<std::size_t>(Sm90ForwardRegion::refused)].bytes;
  };
  EXPECT_EQ(marks(16), 64);
  EXPECT_EQ(marks(0), 0) << "no table, no entry";
}

TEST(Sm90CachedPlan, the_copy_engine_brings_boxes_that_lie_in_a_page) {
  const auto box = [](const PromptSizes& sizes) {
    const Problem problem = sizes.call().problem;
    const ForwardSm90Constants constants = forward_sm90_constants(problem);
    const i32 rows = forward_sm90_box_rows(problem, constants.key_block);
    EXPECT_TRUE(constants.cached);
    EXPECT_EQ(constants.gathers, rows == 0);
    return rows;
  };
  EXPECT_EQ(box({}), 128);
  EXPECT_EQ(box({.padded = true}), 128);
  EXPECT_EQ(box({.page = 256}), 128);
  EXPECT_EQ(box({.page = 128}), 128);
  EXPECT_EQ(box({.slots = 4800, .page = 48}), 16);
  EXPECT_EQ(box({.page = 16}), 16);
  EXPECT_EQ(box({.page = 8}), 0) << "gathering is faster";
  EXPECT_EQ(box({.slots = 4320, .page = 24}), 0);
  EXPECT_EQ(box({.slots = 4224, .d = 192, .page = 176}), 16) << "tiles of 112 keys";
  EXPECT_EQ(box({.d = 256, .page = 64}), 64) << "tiles of 64 keys";
  EXPECT_EQ(box({.slots = 4800, .d = 256, .page = 48}), 16);
  EXPECT_EQ(box({.d = 256}), 80) << "one box, where tiles of 80 keys are the faster ones";
  EXPECT_EQ(box({.slots = 512, .d = 256}), 64);
  EXPECT_EQ(box({.page = 4}), 0);
  EXPECT_EQ(box({.slots = 4200, .page = 100}), 0);
  EXPECT_EQ(box({.page = 1}), 0);
  EXPECT_EQ(box({.page = 128, .padded = true}), 0) << "tiles begin anywhere in a page";
  EXPECT_FALSE(forward_sm90_constants(make_explained(GpuSizes{}.inputs(), {}).problem).cached);
}

TEST(Sm90CachedPlan, ten_thousand_problems_of_a_kind_need_at_most_six_programs) {
  std::mt19937 random(3);
  const auto of = [&](std::initializer_list<i64> values) { return values.begin()[random() % values.size()]; };
  std::vector<ForwardSm90Constants> found;
  for (int i = 0; i < 10000; ++i) {
    PromptSizes sizes{.b = of({1, 2, 5, 64}), .sq = of({1, 64, 500, 4000}), .slots = of({512, 1024, 8192})};
    sizes.page = of({0, 1, 4, 8, 16, 64, 256});
    sizes.padded = random() % 4 == 0;
    sizes.varlen = random() % 2 == 0;
    sizes.d = of({104, 120, 128});
    const Call call = sizes.call({.causal = random() % 2 ? Causal::bottom_right : Causal::none});
    const ForwardSm90Constants constants = forward_sm90_constants(call.problem);
    if (std::find(found.begin(), found.end(), constants) == found.end()) found.push_back(constants);
  }
  EXPECT_LE(found.size(), 6u) << "with masks for two lengths and without, by boxes or by rows";
}

}  // namespace
}  // namespace narrows::test
