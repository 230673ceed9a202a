// Plans of family sm80: what it refuses, tiles, copies and sections.
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "tests/plan/gpu_plan.hpp"

namespace narrows::test {
namespace {

std::string refusal(const Call& call, const Machine& machine = cuda::machine_of("sm_90a")) {
  const std::variant<Plan, Refusal> answer = consider(call, machine);
  return std::holds_alternative<Refusal>(answer) ? std::get<Refusal>(answer) : "";
}

std::string refusal(const GpuSizes& sizes, const Options& options = {}) {
  return refusal(make_explained(sizes.inputs(), options));
}

TEST(Sm80Plan, refuses_by_name_what_it_does_not_compute) {
  EXPECT_EQ(refusal(GpuSizes{.d = 576, .dv = 512}), "");
  EXPECT_EQ(refusal(GpuSizes{}, {.num_splits = 1}), "");
}

TEST(Sm80Plan, thread_blocks_share_the_columns_of_wide_values) {
  const auto plan = [](i64 d, i64 dv) { return plan_of(GpuSizes{.d = d, .dv = dv}); };
  EXPECT_EQ(plan(576, 512).value_slices, 2);
  EXPECT_EQ(plan(576, 512).value_width, 256);
  EXPECT_EQ(plan(576, 512).head_width, 576);
  EXPECT_EQ(plan(64, 257).value_slices, 2);
  EXPECT_EQ(plan(576, 256).value_slices, 1);
  EXPECT_EQ(plan(576, 100).value_width, 128);
  EXPECT_NE(plan(64, 300).text().find("\nslices of V 2\n"), std::string::npos);
  EXPECT_EQ(plan(64, 64).text().find("slices"), std::string::npos);
}

TEST(Sm80Plan, refuses_devices_by_their_numbers) {
  const Call call = make_explained(GpuSizes{}.inputs(), {}),
             wide = make_explained(GpuSizes{.d = 256, .dv = 256}.inputs(), {});
  Machine machine = cuda::machine_of("sm_80");
  EXPECT_EQ(refusal(call, machine), "");
  machine.compute_capability = 75;
  EXPECT_EQ(refusal(call, machine), "needs compute capability 8.0, the device has 7.5");
  machine.compute_capability = 80;
  machine.shared_bytes = 49152;
  EXPECT_EQ(refusal(wide, machine), "no tiles fit 49152 bytes of shared memory");
}

TEST(Sm80Plan, refuses_sizes_that_32_bits_do_not_hold) {
  constexpr i64 kMost = 2147482623;
  EXPECT_EQ(refusal(GpuSizes{.b = 1, .sq = kMost, .h = 1, .hk = 1}), "");
  EXPECT_EQ(refusal(GpuSizes{.sq = kMost + 1}), "takes up to 2147482623 rows of a tensor");
  EXPECT_EQ(refusal(GpuSizes{.sk = kMost + 1}), "takes up to 2147482623 rows of a tensor");
  // 128 rows a block.
  EXPECT_EQ(refusal(GpuSizes{.b = 1 << 9, .sq = 1 << 20, .h = 1 << 9}),
            "takes up to 2147482623 blocks of query rows, not 8192 of 262144 heads");
  EXPECT_EQ(refusal(GpuSizes{.b = 1 << 9, .sq = (1 << 20) - 128, .h = 1 << 9}), "");
  EXPECT_EQ(refusal(GpuSizes{.b = 1 << 20, .sq = 1, .h = 1 << 12}),
            "takes up to 2147482623 blocks of query rows, not 1 of 4294967296 heads");
}

TEST(Sm80Plan, fp64_is_refused_before_any_family_is_asked) {
  try {
    make_explained(GpuSizes{.dtype = DType::fp64}.inputs(), {});
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "q: fp64: fp64 is for the CPU; nearest legal: fp32");
  }
}

/// A view of the same sizes whose rows are apart, or begin elsewhere, or whose last stride is not 1.
Inputs laid_out(const GpuSizes& sizes, i64 padding, std::uintptr_t begin, bool transposed) {
  Inputs in = sizes.inputs();
  for (Tensor* tensor : {&in.q, &in.k, &in.v}) {
    const Dims s = tensor->shape;
    const i64 row = s[3] + padding;
    tensor->strides =
        transposed ? Dims{s[1] * s[2] * row, s[2] * row, 1, s[2]} : Dims{s[1] * s[2] * row, s[2] * row, row, 1};
    tensor->data = reinterpret_cast<void*>((1 << 20) + begin);
  }
  return in;
}

/// From the programming guide: kilobytes of shared memory of a multiprocessor, of which a thread block takes all but one at
/// most, and of which one is the system's for each thread block.
i64 multiprocessor_bytes(int compute_capability) {
  switch (compute_capability) {
    case 80: return 164 << 10;
    case 90:
    case 100: return 228 << 10;
    default: return 100 << 10;
  }
}
/// What a thread block keeps beside its tiles; scripts/compile-kernels checks the compiler's figure.
constexpr i64 kFacts = 1536;

void expect_tiles(const Plan& plan, const Machine& machine, DType dtype) {
  const i64 all = multiprocessor_bytes(machine.compute_capability);
  EXPECT_LE(plan.shared_bytes + kFacts, machine.shared_bytes);
  EXPECT_LE(plan.resident_blocks * (plan.shared_bytes + kFacts + 1024), all);
  EXPECT_EQ(plan.query_block % (16 * plan.warps), 0);
  EXPECT_LE(plan.query_block / plan.warps, 32) << "a lane looks at one row";
  EXPECT_EQ(plan.key_block % 16, 0);
  EXPECT_GE(plan.head_width * static_cast<i64>(item_size(dtype)), 64);
}

void expect_tiles_of(std::string_view architecture, DType dtype, i64 d, i64 dv, const Options& options) {
  const Machine machine = cuda::machine_of(architecture);
  const GpuSizes sizes{.dtype = dtype, .d = d, .dv = dv};
  std::optional<Plan> first;
  for (const i64 padding : {0, 8, 4, 2, 1}) {
    SCOPED_TRACE(text(architecture, " ", dtype, " d=", d, " dv=", dv, " padding ", padding));
    const Call call = make_explained(laid_out(sizes, padding, 0, false), options);
    ASSERT_EQ(refusal(call, machine), "");
    const Plan plan = plan_of(call, machine);
    EXPECT_EQ(plan.head_width, d);
    EXPECT_EQ(plan.value_width, dv);
    expect_tiles(plan, machine, dtype);
    if (!first) first = plan;
    EXPECT_EQ(plan.key_block, first->key_block) << "bits would depend on the layout";
    EXPECT_EQ(plan.query_block, first->query_block);
  }
}

TEST(Sm80Plan, every_width_rule_and_layout_has_tiles_on_every_gpu) {
  EXPECT_EQ(cuda::machine_of("sm_80").shared_bytes, 166912);
  EXPECT_EQ(cuda::machine_of("sm_86").shared_bytes, 101376);
  EXPECT_EQ(cuda::machine_of("sm_90a").shared_bytes, 232448);
  std::array<Options, 6> rules;
  rules[1].softcap = 30;
  rules[2].bias = on_gpu(DType::bf16, {300, 500});
  rules[3].dropout = 0.1;
  rules[4].bias = on_gpu(DType::fp32, {300, 500});
  rules[4].mask = on_gpu(DType::boolean, {300, 500});
  rules[5].mask = rules[4].mask;
  for (const std::string_view architecture : kGpuArchitectures)
    for (const DType dtype : kGpuDTypes)
      for (const i64 d : kChipWidths)
        for (const i64 dv : kChipWidths)
          for (const Options& options : rules) expect_tiles_of(architecture, dtype, d, dv, options);
}

TEST(Sm80Plan, head_dims_take_the_next_width) {
  for (i64 d = 1; d <= 256; ++d) {
    const Plan plan = plan_of(GpuSizes{.d = d, .dv = 257 - d});
    EXPECT_EQ(plan.head_width,
              *std::find_if(kChipWidths.begin(), kChipWidths.end(), [&](i64 width) { return width >= d; }));
    EXPECT_EQ(plan.value_width,
              *std::find_if(kChipWidths.begin(), kChipWidths.end(), [&](i64 width) { return width >= 257 - d; }));
  }
}

TEST(Sm80Plan, copies_are_as_wide_as_every_tensor_allows) {
  const auto bytes = [](const GpuSizes& sizes, i64 padding, std::uintptr_t begin = 0, bool transposed = false) {
    return plan_of(make_explained(laid_out(sizes, padding, begin, transposed), {}), cuda::machine_of("sm_90a"))
        .copy_bytes;
  };
  const GpuSizes bf16{}, fp32{.dtype = DType::fp32};
  EXPECT_EQ(bytes(bf16, 0), 16);
  EXPECT_EQ(bytes(bf16, 8), 16);
  EXPECT_EQ(bytes(bf16, 4), 8);
  EXPECT_EQ(bytes(bf16, 2), 4);
  EXPECT_EQ(bytes(bf16, 1), 2);
  EXPECT_EQ(bytes(bf16, 0, 8), 8);
  EXPECT_EQ(bytes(bf16, 0, 4), 4);
  EXPECT_EQ(bytes(bf16, 0, 2), 2);
  EXPECT_EQ(bytes(bf16, 0, 0, true), 0);
  EXPECT_EQ(bytes(fp32, 0), 16);
  EXPECT_EQ(bytes(fp32, 2), 8);
  EXPECT_EQ(bytes(fp32, 1), 4);
  EXPECT_EQ(bytes(fp32, 0, 4), 4);
  EXPECT_EQ(bytes(fp32, 0, 0, true), 0);
  // A row must be whole pieces too, wherever it begins: what follows it belongs to others.
  EXPECT_EQ(bytes(GpuSizes{.d = 60}, 4), 8);
  EXPECT_EQ(bytes(GpuSizes{.dv = 62}, 2), 4);
  EXPECT_EQ(bytes(GpuSizes{.d = 63, .dv = 63}, 1), 2);
}

TEST(Sm80Plan, the_output_counts_and_tensors_without_elements_do_not) {
  const GpuSizes sizes{};
  Inputs in = sizes.inputs();
  Outputs out{on_gpu(DType::bf16, {2, 300, 4, 64}, {}, 1 << 21), {}};
  const Machine machine = cuda::machine_of("sm_90a");
  EXPECT_EQ(plan_of(make_forward(in, out, {}), machine).copy_bytes, 16);
  out.o.strides = {300 * 4 * 68, 4 * 68, 68, 1};
  EXPECT_EQ(plan_of(make_forward(in, out, {}), machine).copy_bytes, 8);
  const GpuSizes no_keys{.sk = 0};
  in = no_keys.inputs();
  in.k.data = in.v.data = reinterpret_cast<void*>((1 << 20) + 2);
  EXPECT_EQ(plan_of(make_explained(in, {}), machine).copy_bytes, 16);
}

TEST(Sm80Plan, sections_hold_the_keys_of_masked_calls_in_l2) {
  Machine machine = cuda::machine_of("sm_90a");
  machine.l2_bytes = 50 << 20;
  // K and V of a kv head are 2 MiB, 64% of L2 is 32 MiB: 16 of them, with 4 query heads each.
  const GpuSizes sizes{.b = 4, .sq = 4096, .sk = 4096, .h = 32, .hk = 8, .d = 128, .dv = 128};
  const auto section = [&](const GpuSizes& of, const Options& options) {
    return plan_of(of, options, machine).section;
  };
  EXPECT_EQ(section(sizes, {}), 1);
  EXPECT_EQ(section(sizes, {.causal = Causal::bottom_right}), 64);
  EXPECT_EQ(section(sizes, {.window = {100, -1}}), 64);
  EXPECT_EQ(section(sizes, {.chunk = 512}), 64);
  Options bounded, prefix;
  bounded.key_begin = prefix.key_end = on_gpu(DType::int32, {4, 4096});
  EXPECT_EQ(section(sizes, bounded), 64);
  EXPECT_EQ(section(sizes, prefix), 64);
  GpuSizes few = sizes, long_keys = sizes, none = sizes;
  few.b = 1;
  EXPECT_EQ(section(few, {.causal = Causal::bottom_right}), 32) << "not more than there are";
  GpuSizes seven = few;
  seven.h = 28, seven.hk = 7, seven.sk = 8192;  // 4 MiB each
  EXPECT_EQ(section(seven, {.causal = Causal::bottom_right}), 28);
  seven.sk = 12288;  // up to 5 at a time
  EXPECT_EQ(section(seven, {.causal = Causal::bottom_right}), 16) << "4 and 3 heads, not 5 and 2";
  seven.sk = 16384;
  EXPECT_EQ(section(seven, {.causal = Causal::bottom_right}), 16);
  GpuSizes many = few;
  many.hk = 16, many.sk = 20480;  // 10 MiB each, up to 3 at a time
  EXPECT_EQ(section(many, {.causal = Causal::bottom_right}), 4)
      << "2 heads with 2 query heads each, not 3 and at last 1";
  seven.sk = 24576;
  EXPECT_EQ(section(seven, {.causal = Causal::bottom_right}), 8) << "of 2";
  long_keys.sk = 1 << 20;
  EXPECT_EQ(section(long_keys, {.causal = Causal::bottom_right}), 4) << "one kv head at least";
  none.sk = 0;
  EXPECT_EQ(section(none, {.causal = Causal::bottom_right}), 1);
}

}  // namespace
}  // namespace narrows::test
