// Plans of family sm90 for KV caches of wide heads: what is taken and refused, tiles, splits and scratch, and its programs.
#include "plan/sm90_decode.hpp"

#include <gtest/gtest.h>

#include <set>

#include "tests/plan/gpu_plan.hpp"

namespace narrows::test {
namespace {

struct LatentSizes {
  DType dtype = DType::bf16;
  i64 b = 64, sq = 1, slots = 8192, h = 16, hk = 1, d = 576, dv = 512;
  i64 page = 0;  // 0: contiguous
  std::uintptr_t address = 1 << 20;

  Call call(Options options = {}) const {
    const Dims k = page ? Dims{b * slots / page, page, hk, d} : Dims{b, slots, hk, d};
    options.cache_seqlens = on_gpu(DType::int32, {b});
    if (page) options.block_table = on_gpu(DType::int32, {b, slots / page});
    const Inputs in{on_gpu(dtype, {b, sq, h, d}), on_gpu(dtype, k, {}, address),
                    on_gpu(dtype, {k[0], k[1], hk, dv}, {}, address)};
    return make_explained(in, options);
  }
};

Machine h200() {
  Machine machine = cuda::machine_of("sm_90a");
  machine.multiprocessors = 132;
  machine.flops_per_second = 1e15;
  machine.bytes_per_second = 4e12;
  return machine;
}

Choice chosen(const Call& call, const Machine& machine = h200()) { return choose(call.problem, work(call), machine); }

Plan sm90_plan(const Call& call) { return std::get<Plan>(consider_sm90(call.problem, work(call), h200())); }

std::string refusal(const LatentSizes& sizes, const Options& options = {}, const Machine& machine = h200()) {
  const Call call = sizes.call(options);
  const std::variant<Plan, Refusal> answer = consider_sm90(call.problem, work(call), machine);
  return std::holds_alternative<Refusal>(answer) ? std::get<Refusal>(answer) : "";
}

TEST(Sm90DecodePlan, is_preferred_where_it_takes_a_call) {
  for (const LatentSizes& sizes : {LatentSizes{}, LatentSizes{.page = 16}, LatentSizes{.dtype = DType::fp16, .h = 128},
                                   LatentSizes{.sq = 300}, LatentSizes{.h = 64, .hk = 4, .d = 264, .dv = 264},
                                   LatentSizes{.d = 128, .dv = 512}, LatentSizes{.d = 576, .dv = 64}}) {
    const Plan plan = chosen(sizes.call()).plan;
    EXPECT_EQ(plan.family, "sm90");
    EXPECT_TRUE(plan.decodes);
    EXPECT_EQ(plan.query_block, 64);
    EXPECT_EQ(plan.key_block, 64);
    EXPECT_EQ(plan.blocks, 132);
    EXPECT_EQ(plan.head_width, sizes.d == 576 ? 576 : 512);
  }
  EXPECT_EQ(chosen(LatentSizes{.b = 1, .slots = 1024}.call()).plan.family, "sm80") << "over before this one has begun";
  EXPECT_EQ(chosen(LatentSizes{.h = 8}.call()).plan.family, "sm90") << "V is a part of K";
  EXPECT_EQ(chosen(LatentSizes{.h = 8, .hk = 2}.call()).plan.family, "sm80") << "reads nothing twice";
  EXPECT_EQ(chosen(LatentSizes{.b = 1, .h = 128}.call()).plan.family, "sm90") << "16 tiles of packed rows there";
  const Choice narrow = chosen(LatentSizes{.h = 8, .hk = 4, .d = 256, .dv = 256}.call());
  EXPECT_EQ(narrow.plan.family, "sm80");
  EXPECT_TRUE(narrow.refused.empty()) << "it would compute 64 rows for one";
}

TEST(Sm90DecodePlan, refuses_by_name_what_it_does_not_compute) {
  EXPECT_EQ(refusal({}), "");
  EXPECT_EQ(refusal({}, {.softcap = 3, .window = {100, -1}, .chunk = 9, .num_splits = 4}), "");
  EXPECT_EQ(refusal({}, {}, cuda::machine_of("sm_80")), "needs compute capability 9.0, the device has 8.0");
  EXPECT_EQ(refusal({.dtype = DType::fp32}), "takes bf16 and fp16, not fp32");
  EXPECT_EQ(refusal({.d = 260}), "decodes head dims that are multiples of 8 up to d=576 dv=512, not d=260 dv=512");
  EXPECT_EQ(refusal({.dv = 511}), "decodes head dims that are multiples of 8 up to d=576 dv=512, not d=576 dv=511");
  EXPECT_EQ(refusal({}, {.batch_invariant = true}),
            "does not read every layout, as batch_invariant asks of one kernel");
  EXPECT_EQ(refusal({}, {.bias = on_gpu(DType::fp32, {1, 1, 1, 8192})}), "has no bias");
  EXPECT_EQ(refusal({}, {.mask = on_gpu(DType::boolean, {1, 1, 1, 8192})}), "has no mask");
  EXPECT_EQ(refusal({}, {.dropout = 0.5, .seed = 1}), "has no dropout");
  EXPECT_EQ(refusal({.address = (1 << 20) + 8}),
            "needs q, k and v with adjoining columns, and rows at multiples of 16 bytes");
  EXPECT_EQ(refusal({.b = 1 << 15, .sq = 1 << 15, .slots = 1 << 16}),
            "takes up to 2147482623 tiles of 64 query rows by 64 keys, where the cache is full, not 276756955136");
}

TEST(Sm90DecodePlan, scratch_is_two_slots_of_a_block_or_one_of_a_split) {
  const auto bytes = [](const LatentSizes& sizes, const Options& options = {}) {
    return sm90_plan(sizes.call(options)).workspace_bytes();
  };
  const i64 slot = 64 * (512 * 4 + 8) + 8;
  EXPECT_EQ(bytes({}), 2 * 132 * slot);
  EXPECT_EQ(bytes({.h = 128}), 2 * 132 * slot);
  EXPECT_EQ(bytes({}, {.num_splits = 1}), 0);
  EXPECT_EQ(bytes({.b = 8, .h = 128}, {.num_splits = 4}), 8 * 2 * 4 * slot);
  EXPECT_EQ(bytes({.b = 2, .slots = 1 << 20}, {.num_splits = 1000}), 2 * 240 * slot)
      << "more weights find no room on chip";
}

TEST(Sm90DecodePlan, fits_the_device_and_needs_few_programs) {
  EXPECT_LE(sm90_plan(LatentSizes{}.call()).shared_bytes, h200().shared_bytes);
  std::set<std::string> programs;
  for (const i64 d : {8, 64, 264, 512, 576})
    for (const i64 dv : {256, 264, 512})
      for (const i64 b : {1, 64}) {
        const LatentSizes sizes{.b = b, .d = d, .dv = dv};
        if (std::max(d, dv) <= 256) continue;
        const Call call = sizes.call();
        const Plan plan = sm90_plan(call);
        programs.insert(decode_sm90_program(decode_constants(call.problem, plan)).config);
      }
  EXPECT_EQ(programs.size(), 2u);
  EXPECT_EQ(planned_decode_sm90_programs(cuda::machine_of("sm_90a")).size(), 4u);
  EXPECT_TRUE(planned_decode_sm90_programs(cuda::machine_of("sm_100")).empty());
  const std::string text =
      decode_sm90_program(decode_constants(LatentSizes{}.call().problem, sm90_plan(LatentSizes{}.call()))).config;
  for (const char* constant : {"kHeadDim = 576;", "kValueDim = 512;", "kBlockQueries = 64;", "kBlockKeys = 64;",
                               "kStages = 2;", "m64n64k16", "m64n256k16"})
    EXPECT_NE(text.find(constant), std::string::npos) << constant;
}

}  // namespace
}  // namespace narrows::test
