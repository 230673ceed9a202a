// Plans of family sm80 for KV caches: what is taken, tiles, splits and scratch, and how few programs many problems need.
#include "plan/sm80_decode.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "tests/plan/gpu_plan.hpp"

namespace narrows::test {
namespace {

struct CacheSizes {
  DType dtype = DType::bf16;
  i64 b = 2, sq = 1, slots = 4096, h = 32, hk = 8, d = 128, dv = 128;
  i64 page = 0;  // 0: contiguous
  std::uintptr_t address = 1 << 20;

  Call call(Options options = {}) const {
    const Dims k = page ? Dims{b * slots / page, page, hk, d} : Dims{b, slots, hk, d};
    const Dims v{k[0], k[1], hk, dv};
    options.cache_seqlens = on_gpu(DType::int32, {b});
    if (page) options.block_table = on_gpu(DType::int32, {b, slots / page});
    const Inputs in{on_gpu(dtype, {b, sq, h, d}, {}, address), on_gpu(dtype, k, {}, address),
                    on_gpu(dtype, v, {}, address)};
    return make_explained(in, options);
  }
};

Machine h200() {
  Machine machine = cuda::machine_of("sm_90a");
  machine.multiprocessors = 132;
  return machine;
}

Plan decode_plan(const CacheSizes& sizes, const Options& options = {}) { return plan_of(sizes.call(options), h200()); }

std::string decode_refusal(const CacheSizes& sizes) {
  const std::variant<Plan, Refusal> answer = consider(sizes.call(), h200());
  return std::holds_alternative<Refusal>(answer) ? std::get<Refusal>(answer) : "";
}

TEST(Sm80DecodePlan, takes_caches_pages_and_splits_of_tensors) {
  EXPECT_TRUE(decode_plan({}).decodes);
  EXPECT_TRUE(decode_plan({.page = 16}).decodes);
  EXPECT_TRUE(decode_plan({.sq = 300, .d = 576, .dv = 512}).decodes);
  EXPECT_TRUE(plan_of(GpuSizes{}, {.num_splits = 3}).decodes);
  EXPECT_FALSE(plan_of(GpuSizes{}, {.num_splits = 1}).decodes);
  EXPECT_FALSE(plan_of(GpuSizes{}, {.batch_invariant = true, .num_splits = 3}).decodes)
      << "bits do not depend on num_splits: the kernel of any other call";
}

TEST(Sm80DecodePlan, refuses_by_name_what_32_bits_do_not_hold) {
  EXPECT_EQ(decode_refusal({.b = 1, .slots = 2147482624, .h = 1, .hk = 1}), "takes up to 2147482623 rows of a tensor");
  EXPECT_EQ(decode_refusal({.b = 1 << 10, .sq = 1 << 10, .slots = 1 << 16}),
            "takes up to 2147482623 tiles of 16 query rows by 16 keys, where the cache is full, not 8604614656");
  EXPECT_EQ(decode_refusal({.b = 8, .sq = 8192, .slots = 131072, .address = (1 << 20) + 2}),
            "takes up to 2147482623 tiles of 8 query rows by 16 keys, where the cache is full, not 2149318656");
}

/// Prompts that are appended to long caches: tiles are counted as the kernel has them.
TEST(Sm80DecodePlan, takes_prompts_of_many_rows_over_long_caches) {
  EXPECT_EQ(decode_plan({.b = 8, .sq = 8192, .slots = 131072}).query_block, 16);
  EXPECT_EQ(decode_plan({.b = 1, .sq = 65536, .slots = 131072}).query_block, 16);
}

TEST(Sm80DecodePlan, a_call_that_appends_to_pages_marks_sequences_that_it_refuses) {
  const auto marks = [](i64 page, bool appends) {
    Options options;
    if (appends) options.k_new = options.v_new = on_gpu(DType::bf16, {2, 1, 8, 128});
    return decode_plan({.page = page}, options).workspace[static_cast<std::size_t>(Sm80DecodeRegion::refused)].bytes;
  };
  EXPECT_GE(marks(16, true), 2 * 4);
  EXPECT_EQ(marks(16, false), 0);
  EXPECT_EQ(marks(0, true), 0) << "no table, no entry";
}

TEST(Sm80DecodePlan, warps_and_thread_blocks_by_rows) {
  const auto shape = [](const CacheSizes& sizes, const Options& options = {}) {
    const Plan plan = decode_plan(sizes, options);
    return std::array<i64, 3>{plan.query_block, plan.warps, plan.blocks};
  };
  using Shape = std::array<i64, 3>;
  EXPECT_EQ(shape({.b = 1}), (Shape{8, 8, 132})) << "8 rows: 16 pieces of each";
  EXPECT_EQ(shape({.b = 16}), (Shape{8, 8, 132}));
  EXPECT_EQ(shape({.b = 9}), (Shape{8, 4, 264})) << "72 rows, of which no number of pieces fills 132 blocks";
  EXPECT_EQ(shape({.b = 64}), (Shape{8, 4, 264}));
  EXPECT_EQ(shape({.b = 32}), (Shape{8, 4, 264})) << "256 rows, a piece each";
  EXPECT_EQ(shape({.b = 20}), (Shape{8, 4, 264})) << "160 rows: stretches";
  EXPECT_EQ(shape({.b = 48}), (Shape{8, 4, 396})) << "384 rows, a piece each";
  EXPECT_EQ(shape({.b = 45}), (Shape{8, 4, 264})) << "360 rows";
  EXPECT_EQ(shape({.b = 16, .sq = 4}), (Shape{16, 8, 132})) << "4 queries of 4 heads";
  EXPECT_EQ(shape({.b = 64, .sq = 4}), (Shape{16, 4, 264}));
  EXPECT_EQ(shape({.b = 16, .sq = 4}, {.batch_invariant = true}), (Shape{16, 4, 264}));
  EXPECT_EQ(shape({.b = 16, .sq = 4, .address = (1 << 20) + 2}), (Shape{8, 4, 264})) << "element by element";
  EXPECT_EQ(shape({.hk = 1, .d = 576, .dv = 512}), (Shape{8, 8, 132})) << "bytes in flight";
  EXPECT_EQ(shape({.b = 1}, {.batch_invariant = true})[1], 4) << "as many warps as in every other call";
  EXPECT_EQ(shape({.b = 16}, {.batch_invariant = true}), (Shape{8, 4, 396}));
  EXPECT_EQ(shape({.d = 256, .dv = 256})[0], 8);
  EXPECT_EQ(shape({.b = 1, .address = (1 << 20) + 2})[1], 4) << "element by element";
}

TEST(Sm80DecodePlan, scratch_is_two_slots_of_a_block_or_one_of_a_split) {
  const auto bytes = [](const CacheSizes& sizes, const Options& options = {}) {
    return decode_plan(sizes, options).workspace_bytes();
  };
  const i64 slot = 8 * (128 * 4 + 8) + 8;
  EXPECT_EQ(bytes({.b = 1}), 2 * 132 * slot);
  EXPECT_EQ(bytes({.b = 1}), bytes({.b = 1, .slots = 131072})) << "however many keys there are";
  EXPECT_EQ(bytes({}, {.num_splits = 1}), 0);
  EXPECT_EQ(bytes({}, {.num_splits = 4}), 16 * 4 * slot);
  EXPECT_EQ(bytes({}, {.num_splits = 1000}), bytes({}, {.num_splits = 256})) << "splits of no tile are none";
  EXPECT_EQ(bytes({}, {.batch_invariant = true, .num_splits = 4}), 16 * 8 * slot) << "of 512 keys";
}

TEST(Sm80DecodePlan, says_what_it_does) {
  EXPECT_NE(decode_plan({.b = 1}).text().find("keys shared out by the device among 132 thread blocks\n"),
            std::string::npos);
  EXPECT_NE(decode_plan({}, {.num_splits = 4}).text().find("splits of a row's keys, at most 4\n"), std::string::npos);
  EXPECT_NE(decode_plan({}, {.batch_invariant = true}).text().find("keys of a split 512\n"), std::string::npos);
}

TEST(Sm80DecodePlan, ten_thousand_problems_of_a_kind_need_at_most_six_programs) {
  std::mt19937 random(3);
  const auto of = [&](std::initializer_list<i64> values) { return values.begin()[random() % values.size()]; };
  for (const DType dtype : kGpuDTypes) {
    std::vector<DecodeConstants> found;
    for (int i = 0; i < 10000; ++i) {
      CacheSizes sizes{.dtype = dtype, .b = of({1, 2, 5, 9, 16, 20, 64, 128}), .sq = of({1, 1, 2, 4, 7, 40})};
      sizes.hk = of({1, 2, 8});
      sizes.h = sizes.hk * of({1, 3, 4, 8, 20});
      sizes.d = of({104, 120, 128});
      sizes.dv = of({100, 128});
      sizes.slots = of({64, 1024, 8192});
      sizes.page = of({0, 1, 16});
      sizes.address += static_cast<std::uintptr_t>(of({0, 0, 0, 4, 8}));
      const Call call = sizes.call({.causal = random() % 2 ? Causal::bottom_right : Causal::none,
                                    .batch_invariant = random() % 4 == 0,
                                    .num_splits = static_cast<int>(of({0, 0, 1, 5}))});
      const DecodeConstants constants = decode_constants(call.problem, plan_of(call, h200()));
      if (std::find(found.begin(), found.end(), constants) == found.end()) found.push_back(constants);
    }
    EXPECT_LE(found.size(), 6u) << narrows::name(dtype);
    EXPECT_GE(found.size(), dtype == DType::fp32 ? 2u : 5u) << narrows::name(dtype);
  }
}

TEST(Sm80DecodePlan, every_table_row_fits_every_device) {
  for (const std::string_view architecture : kGpuArchitectures)
    for (const DType dtype : kGpuDTypes)
      for (const i64 width : {32, 64, 96, 128, 192, 256, 512, 576})
        for (const i64 sq : {1, 5}) {
          const CacheSizes sizes{.dtype = dtype, .sq = sq, .d = width, .dv = std::min<i64>(width, 512)};
          const Machine machine = cuda::machine_of(architecture);
          const Plan plan = plan_of(sizes.call(), machine);
          constexpr i64 kStatic = 1536;  // what scripts/compile-kernels allows
          EXPECT_LE(plan.shared_bytes + kStatic, machine.shared_bytes + 1024) << architecture << " " << width;
        }
  Machine small = cuda::machine_of("sm_86");
  small.shared_bytes = 16 * 1024;
  const std::variant<Plan, Refusal> answer = consider(CacheSizes{}.call(), small);
  ASSERT_TRUE(std::holds_alternative<Refusal>(answer));
  EXPECT_EQ(std::get<Refusal>(answer), "no tiles fit 16384 bytes of shared memory");
}

}  // namespace
}  // namespace narrows::test
