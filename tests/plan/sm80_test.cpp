// Plans of family sm80: what it refuses, tiles, copies, sections, and how few programs many problems need.
#include "plan/sm80.hpp"

#include <gtest/gtest.h>

#include "core/error.hpp"
#include "cuda/planned.hpp"
#include "plan/plan.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <random>
#include <stdexcept>
#include <vector>

namespace narrows::test {
namespace {

constexpr Device kGpu{DeviceKind::cuda, 0};
constexpr std::array kArchitectures{"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120"};
constexpr std::array kDTypes{DType::fp16, DType::bf16, DType::fp32};
constexpr std::array<i64, 6> kWidths{32, 64, 96, 128, 192, 256};

Tensor on_gpu(DType dtype, const Dims& shape, const Dims& strides = {}, std::uintptr_t address = 1 << 20) {
  return {reinterpret_cast<void*>(address), dtype, shape, strides, kGpu};
}

/// Dense q (b, sq, h, d), k (b, sk, hk, d), v (b, sk, hk, dv).
struct Sizes {
  DType dtype = DType::bf16;
  i64 b = 2, sq = 300, sk = 500, h = 4, hk = 2, d = 64, dv = 64;

  Inputs inputs() const {
    return {on_gpu(dtype, {b, sq, h, d}), on_gpu(dtype, {b, sk, hk, d}), on_gpu(dtype, {b, sk, hk, dv})};
  }
};

std::variant<Plan, Refusal> consider(const Call& call, const Machine& machine) {
  return consider_sm80(call.problem, work(call), machine);
}

Plan plan_of(const Call& call, const Machine& machine) {
  const std::variant<Plan, Refusal> answer = consider(call, machine);
  if (const Refusal* reason = std::get_if<Refusal>(&answer)) throw std::runtime_error(*reason);
  return std::get<Plan>(answer);
}

Plan plan_of(const Sizes& sizes, const Options& options = {}, const Machine& machine = cuda::machine_of("sm_90a")) {
  return plan_of(make_explained(sizes.inputs(), options), machine);
}

std::string refusal(const Call& call, const Machine& machine = cuda::machine_of("sm_90a")) {
  const std::variant<Plan, Refusal> answer = consider(call, machine);
  return std::holds_alternative<Refusal>(answer) ? std::get<Refusal>(answer) : "";
}

std::string refusal(const Sizes& sizes, const Options& options = {}) {
  return refusal(make_explained(sizes.inputs(), options));
}

TEST(Sm80Plan, refuses_by_name_what_it_does_not_compute) {
  EXPECT_EQ(refusal(make_explained_backward(Sizes{}.inputs(), {})), "has no backward kernel");
  EXPECT_EQ(refusal(Sizes{.d = 257, .dv = 64}), "takes head dims up to 256, not d=257 dv=64");
  EXPECT_EQ(refusal(Sizes{.d = 64, .dv = 257}), "takes head dims up to 256, not d=64 dv=257");
  EXPECT_EQ(refusal(Sizes{.d = 256, .dv = 256}), "");
  EXPECT_EQ(refusal(Sizes{}, {.num_splits = 3}), "does not split keys, num_splits=3");
  EXPECT_EQ(refusal(Sizes{}, {.num_splits = 1}), "");

  const Inputs cached{on_gpu(DType::bf16, {2, 1, 4, 64}), on_gpu(DType::bf16, {3, 16, 2, 64}),
                      on_gpu(DType::bf16, {3, 16, 2, 64})};
  Options options;
  options.cache_seqlens = on_gpu(DType::int32, {2});
  options.cache_batch_idx = on_gpu(DType::int32, {2});
  EXPECT_EQ(refusal(make_explained(cached, options)), "does not read KV caches");
  options.cache_batch_idx = {};
  options.block_table = on_gpu(DType::int32, {2, 3});
  EXPECT_EQ(refusal(make_explained(cached, options)), "does not read KV caches");
}

TEST(Sm80Plan, refuses_devices_by_their_numbers) {
  const Call call = make_explained(Sizes{}.inputs(), {}),
             wide = make_explained(Sizes{.d = 256, .dv = 256}.inputs(), {});
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
  EXPECT_EQ(refusal(Sizes{.b = 1, .sq = kMost, .h = 1, .hk = 1}), "");
  EXPECT_EQ(refusal(Sizes{.sq = kMost + 1}), "takes up to 2147482623 rows of a tensor");
  EXPECT_EQ(refusal(Sizes{.sk = kMost + 1}), "takes up to 2147482623 rows of a tensor");
  // 128 rows a block.
  EXPECT_EQ(refusal(Sizes{.b = 1 << 9, .sq = 1 << 20, .h = 1 << 9}),
            "takes up to 2147482623 blocks of query rows, not 8192 of 262144 heads");
  EXPECT_EQ(refusal(Sizes{.b = 1 << 9, .sq = (1 << 20) - 128, .h = 1 << 9}), "");
  EXPECT_EQ(refusal(Sizes{.b = 1 << 20, .sq = 1, .h = 1 << 12}),
            "takes up to 2147482623 blocks of query rows, not 1 of 4294967296 heads");
}

TEST(Sm80Plan, fp64_is_refused_before_any_family_is_asked) {
  try {
    make_explained(Sizes{.dtype = DType::fp64}.inputs(), {});
    ADD_FAILURE() << "accepted";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "q: fp64: fp64 is for the CPU; nearest legal: fp32");
  }
}

/// A view of the same sizes whose rows are apart, or begin elsewhere, or whose last stride is not 1.
Inputs laid_out(const Sizes& sizes, i64 padding, std::uintptr_t begin, bool transposed) {
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
  const Sizes sizes{.dtype = dtype, .d = d, .dv = dv};
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
  for (const std::string_view architecture : kArchitectures)
    for (const DType dtype : kDTypes)
      for (const i64 d : kWidths)
        for (const i64 dv : kWidths)
          for (const Options& options : rules) expect_tiles_of(architecture, dtype, d, dv, options);
}

TEST(Sm80Plan, head_dims_take_the_next_width) {
  for (i64 d = 1; d <= 256; ++d) {
    const Plan plan = plan_of(Sizes{.d = d, .dv = 257 - d});
    EXPECT_EQ(plan.head_width, *std::find_if(kWidths.begin(), kWidths.end(), [&](i64 width) { return width >= d; }));
    EXPECT_EQ(plan.value_width,
              *std::find_if(kWidths.begin(), kWidths.end(), [&](i64 width) { return width >= 257 - d; }));
  }
}

TEST(Sm80Plan, copies_are_as_wide_as_every_tensor_allows) {
  const auto bytes = [](const Sizes& sizes, i64 padding, std::uintptr_t begin = 0, bool transposed = false) {
    return plan_of(make_explained(laid_out(sizes, padding, begin, transposed), {}), cuda::machine_of("sm_90a"))
        .copy_bytes;
  };
  const Sizes bf16{}, fp32{.dtype = DType::fp32};
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
  EXPECT_EQ(bytes(Sizes{.d = 60}, 4), 8);
  EXPECT_EQ(bytes(Sizes{.dv = 62}, 2), 4);
  EXPECT_EQ(bytes(Sizes{.d = 63, .dv = 63}, 1), 2);
}

TEST(Sm80Plan, the_output_counts_and_tensors_without_elements_do_not) {
  const Sizes sizes{};
  Inputs in = sizes.inputs();
  Outputs out{on_gpu(DType::bf16, {2, 300, 4, 64}, {}, 1 << 21), {}};
  const Machine machine = cuda::machine_of("sm_90a");
  EXPECT_EQ(plan_of(make_forward(in, out, {}), machine).copy_bytes, 16);
  out.o.strides = {300 * 4 * 68, 4 * 68, 68, 1};
  EXPECT_EQ(plan_of(make_forward(in, out, {}), machine).copy_bytes, 8);
  const Sizes no_keys{.sk = 0};
  in = no_keys.inputs();
  in.k.data = in.v.data = reinterpret_cast<void*>((1 << 20) + 2);
  EXPECT_EQ(plan_of(make_explained(in, {}), machine).copy_bytes, 16);
}

TEST(Sm80Plan, sections_hold_the_keys_of_masked_calls_in_l2) {
  Machine machine = cuda::machine_of("sm_90a");
  machine.l2_bytes = 50 << 20;
  // K and V of a kv head are 2 MiB, 64% of L2 is 32 MiB: 16 of them, with 4 query heads each.
  const Sizes sizes{.b = 4, .sq = 4096, .sk = 4096, .h = 32, .hk = 8, .d = 128, .dv = 128};
  const auto section = [&](const Sizes& of, const Options& options) { return plan_of(of, options, machine).section; };
  EXPECT_EQ(section(sizes, {}), 1);
  EXPECT_EQ(section(sizes, {.causal = Causal::bottom_right}), 64);
  EXPECT_EQ(section(sizes, {.window = {100, -1}}), 64);
  EXPECT_EQ(section(sizes, {.chunk = 512}), 64);
  Sizes few = sizes, long_keys = sizes, none = sizes;
  few.b = 1;
  EXPECT_EQ(section(few, {.causal = Causal::bottom_right}), 32) << "not more than there are";
  long_keys.sk = 1 << 20;
  EXPECT_EQ(section(long_keys, {.causal = Causal::bottom_right}), 4) << "one kv head at least";
  none.sk = 0;
  EXPECT_EQ(section(none, {.causal = Causal::bottom_right}), 1);
}

// ------------------------------------------------------------------------------------------------- programs of many problems

/// What makes a kernel: rules, dtype and bucket of head dims. The signs of scales belong to the rules, and the bias's dtype.
struct Kind {
  std::string_view name;
  DType dtype;
  i64 head_width, value_width;
  bool softcap = false, alibi = false, bias = false, mask = false, dropout = false, negative = false;
  DType bias_dtype = DType::fp32;
};

class RandomProblems {
 public:
  explicit RandomProblems(const Kind& kind) : kind_(kind) {}

  Call next() {
    const bool varlen = chance(3), varlen_keys = varlen || chance(4);
    sizes_ = {kind_.dtype, 1 + below(5), 1 + below(5000), 1 + below(9000), 0, 1 + below(8), 0, 0};
    sizes_.h = sizes_.hk * (1 + below(4));
    sizes_.d = in_bucket(kind_.head_width);
    sizes_.dv = in_bucket(kind_.value_width);
    Inputs in{tensor({sizes_.b, sizes_.sq, sizes_.h, sizes_.d}, varlen),
              tensor({sizes_.b, sizes_.sk, sizes_.hk, sizes_.d}, varlen_keys),
              tensor({sizes_.b, sizes_.sk, sizes_.hk, sizes_.dv}, varlen_keys)};
    Options options;
    if (varlen) options.cu_seqlens_q = ints(sizes_.b + 1);
    if (varlen_keys) options.cu_seqlens_k = ints(sizes_.b + 1);
    add_lengths(options);
    add_masks(options);
    add_rules(options);
    return make_explained(in, options);
  }

 private:
  i64 below(i64 n) { return std::uniform_int_distribution<i64>(0, n - 1)(random_); }
  bool chance(i64 one_in) { return below(one_in) == 0; }
  static Tensor ints(i64 count) { return on_gpu(DType::int32, {count}); }

  /// A head dim of the bucket: mostly an even one.
  i64 in_bucket(i64 width) {
    const auto at = std::find(kWidths.begin(), kWidths.end(), width);
    const i64 above = at == kWidths.begin() ? 0 : at[-1];
    const i64 step = std::array{1, 2, 4, 8}[static_cast<std::size_t>(below(4))];
    return width - below((width - above - 1) / step + 1) * step;
  }
  /// (b, s, h, d) as rows anywhere; without the first axis if varlen.
  Tensor tensor(const Dims& shape, bool varlen) {
    const i64 last = chance(6) ? 1 + below(3) : 1;
    const i64 head = shape[3] * last + std::array{0, 0, 1, 2, 4, 8}[static_cast<std::size_t>(below(6))];
    const bool heads_first = chance(3);
    const i64 row = heads_first ? head : head * shape[2], of_head = heads_first ? head * shape[1] : head;
    const std::uintptr_t item = item_size(kind_.dtype);
    const std::uintptr_t begin = chance(3) ? item * static_cast<std::uintptr_t>(below(16)) : 0;
    if (varlen) return on_gpu(kind_.dtype, {shape[1], shape[2], shape[3]}, {row, of_head, last}, (1 << 20) + begin);
    return on_gpu(kind_.dtype, shape, {chance(5) ? 0 : head * shape[1] * shape[2], row, of_head, last},
                  (1 << 20) + begin);
  }
  void add_lengths(Options& options) {
    if (chance(3)) options.seqused_q = ints(sizes_.b);
    if (chance(3)) options.seqused_k = ints(sizes_.b);
    if (chance(3)) options.shift = ints(sizes_.b);
    if (chance(2)) options.sinks = on_gpu(kDTypes[static_cast<std::size_t>(below(3))], {sizes_.h});
    options.batch_invariant = chance(4);
    options.num_splits = static_cast<int>(below(2));
  }
  void add_masks(Options& options) {
    if (!options.shift.given() && chance(2)) options.causal = chance(2) ? Causal::bottom_right : Causal::top_left;
    if (chance(2)) options.window = {below(5000) - 1, options.causal == Causal::none ? below(5000) - 1 : -1};
    if (chance(4)) options.chunk = 1 + below(3000);
  }
  /// Every number of a rule is any number.
  void add_rules(Options& options) {
    const double size = std::exp(std::normal_distribution<double>(0, 3)(random_));
    if (kind_.negative) options.scale = chance(4) ? 0 : -size;
    if (!kind_.negative && chance(2)) options.scale = size;
    if (kind_.softcap) options.softcap = size;
    if (kind_.alibi)
      options.alibi_slopes = chance(2) ? on_gpu(DType::fp32, {sizes_.h}) : on_gpu(DType::bf16, {sizes_.b, sizes_.h});
    const Dims broadcast{chance(2) ? 1 : sizes_.b, chance(2) ? 1 : sizes_.h, chance(4) ? 1 : sizes_.sq, sizes_.sk};
    if (kind_.bias) options.bias = on_gpu(kind_.bias_dtype, broadcast);
    if (kind_.mask) options.mask = on_gpu(DType::boolean, broadcast);
    if (!kind_.dropout) return;
    options.dropout = 0.001 + 0.1 * static_cast<double>(below(9));
    options.seed = static_cast<std::uint64_t>(below(1 << 30));
    options.origin = {below(9), below(9), below(99), below(99), sizes_.h + 20};
  }

  Kind kind_;
  std::mt19937 random_{7};
  Sizes sizes_;
};

TEST(Sm80Plan, ten_thousand_problems_of_a_kind_need_at_most_six_programs) {
  constexpr std::array kKinds{
      Kind{"plain", DType::bf16, 128, 128},
      Kind{"plain", DType::fp16, 64, 64},
      Kind{"two widths", DType::bf16, 192, 128},
      Kind{"plain", DType::fp32, 96, 96},
      Kind{.name = "negative scales", .dtype = DType::bf16, .head_width = 64, .value_width = 64, .negative = true},
      Kind{.name = "softcap", .dtype = DType::bf16, .head_width = 256, .value_width = 256, .softcap = true},
      Kind{.name = "bias",
           .dtype = DType::fp16,
           .head_width = 128,
           .value_width = 128,
           .bias = true,
           .bias_dtype = DType::bf16},
      Kind{.name = "all",
           .dtype = DType::fp32,
           .head_width = 32,
           .value_width = 64,
           .softcap = true,
           .alibi = true,
           .bias = true,
           .mask = true,
           .dropout = true}};
  for (const std::string_view architecture : {"sm_86", "sm_90a"})
    for (const Kind& kind : kKinds) {
      SCOPED_TRACE(text(architecture, " ", kind.name, " ", kind.dtype, " ", kind.head_width, " ", kind.value_width));
      const Machine machine = cuda::machine_of(architecture);
      RandomProblems problems(kind);
      std::vector<ForwardConstants> found;
      for (int i = 0; i < 10000; ++i) {
        const Call call = problems.next();
        const ForwardConstants constants = forward_constants(call.problem, plan_of(call, machine));
        if (std::find(found.begin(), found.end(), constants) == found.end()) found.push_back(constants);
      }
      // One for each way to copy: 16, 8, 4 bytes, element by element, and 16-bit rows that are shifted.
      EXPECT_EQ(found.size(), kind.dtype == DType::fp32 ? 4u : 5u);
      for (const ForwardConstants& constants : found) {
        EXPECT_EQ(constants.head_width, kind.head_width);
        EXPECT_EQ(constants.natural, kind.softcap || kind.alibi || kind.bias || kind.negative);
      }
    }
}

TEST(Sm80Plan, equal_programs_are_those_of_equal_constants) {
  const auto program = [](const Sizes& sizes, const Options& options) {
    const Call call = make_explained(sizes.inputs(), options);
    return forward_program(forward_constants(call.problem, plan_of(call, cuda::machine_of("sm_90a"))));
  };
  const Program plain = program(Sizes{}, {});
  EXPECT_EQ(plain.config,
            program(Sizes{.b = 7, .sq = 1, .sk = 99, .h = 8, .hk = 8}, {.scale = 3, .window = {4, 5}}).config);
  EXPECT_FALSE(plain.exact_math);
  EXPECT_TRUE(program(Sizes{.dtype = DType::fp32}, {}).exact_math);
  for (const Program& other :
       {program(Sizes{.dtype = DType::fp16}, {}), program(Sizes{.d = 65}, {}), program(Sizes{.dv = 65}, {}),
        program(Sizes{.d = 63}, {}), program(Sizes{}, {.scale = -1}), program(Sizes{}, {.softcap = 2}),
        program(Sizes{}, {.dropout = 0.5})})
    EXPECT_NE(other.config, plain.config);
}

}  // namespace
}  // namespace narrows::test
