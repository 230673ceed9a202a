// Calls over caches one after the other and beside each other: other layouts and types of one shape, streams, devices,
// and pages far into a pool.
#include "tests/gpu/paged.hpp"
#include "tests/gpu/spread.hpp"

#include <algorithm>
#include <cstring>

namespace narrows::test {
namespace {

using GpuCacheCalls = GpuTest;
using GpuStressCache = GpuTest;

/// A cache of two sequences of 2048 slots, filled in part.
struct Contiguous {
  Attention a;
  Array filled = int32_array({2048, 1500});

  explicit Contiguous(DType dtype, std::int64_t heads = 8) : a({2, 1, 2048, heads, heads / 4, 128, 128}, dtype) {
    a.options.cache_seqlens = filled;
    a.options.family = "sm80";
  }
};

void run(Attention& a) {
  a.o.poison();
  a.lse.poison();
  DeviceCall gpu(a.in(), a.out(), a.options);
  gpu.run();
  gpu.download();
  ASSERT_EQ(gpu.status().code, 0);
}

/// K and V as views of one tensor, (b, slots, hk, K then V), and the same numbers in other strides.
TEST_F(GpuCacheCalls, G08_other_strides_and_types_of_one_shape) {
  Contiguous call(DType::bf16);
  run(call.a);
  const Array o = call.a.o, lse = call.a.lse;
  const Array both = std::move(Array(DType::bf16, {2, 2048, 2, 256}).fill([&](const Dims& at) {
    return at[3] < 128 ? call.a.k[at] : call.a.v[{at[0], at[1], at[2], at[3] - 128}];
  }));
  const Dims strides{2048 * 512, 512, 256, 1};
  const Tensor k{both.tensor().data, DType::bf16, call.a.k.shape(), strides, {}};
  const Tensor v{static_cast<std::byte*>(k.data) + 128 * 2, DType::bf16, call.a.v.shape(), strides, {}};
  call.a.o.poison();
  DeviceCall views({call.a.q, k, v}, call.a.out(), call.a.options);
  views.run();
  views.download();
  EXPECT_TRUE(call.a.o.same_bits(o) && call.a.lse.same_bits(lse));

  Array turned(DType::bf16, call.a.k.shape(), {.order = {2, 0, 1, 3}, .gap = 3});  // rows at multiples of 2 bytes
  turned.fill([&](const Dims& at) { return call.a.k[at]; });
  DeviceCall unaligned({call.a.q, turned, call.a.v}, call.a.out(), call.a.options);
  unaligned.run();
  unaligned.download();
  expect_within_bounds(call.a);

  for (const DType dtype : {DType::fp16, DType::fp32, DType::bf16}) {
    Contiguous other(dtype);
    run(other.a);
    expect_within_bounds(other.a);
  }
}

TEST_F(GpuStressCache, L06_calls_of_one_shape_on_two_streams) {
  Contiguous first(DType::bf16), second(DType::bf16);
  second.a.q.fill_gaussian(77);
  run(first.a);
  run(second.a);
  const std::array<Array, 2> expected{first.a.o, second.a.o};
  const std::array<TestStream, 2> streams;
  DeviceCall one(first.a.in(), first.a.out(), first.a.options), two(second.a.in(), second.a.out(), second.a.options);
  one.options.stream = streams[0].handle();
  two.options.stream = streams[1].handle();
  one.run();  // makes its workspace, which is poisoned on the legacy stream too: these two do not wait for that one
  two.run();
  wait_for_device();
  for (int iteration = 0; iteration < 100; ++iteration) {
    one.run();
    two.run();
    if (iteration % 10) continue;
    one.download();
    two.download();
    ASSERT_TRUE(first.a.o.same_bits(expected[0]) && second.a.o.same_bits(expected[1])) << "iteration " << iteration;
  }
  EXPECT_TRUE(one.surroundings_intact() && two.surroundings_intact());
}

TEST_F(GpuStressCache, L01_a_cache_on_device_1_while_device_0_is_current) {
  if (cuda::find_driver().devices < 2) GTEST_SKIP() << "one GPU here";
  Contiguous call(DType::fp16, 32);
  run(call.a);
  const Array expected = call.a.o;
  std::optional<DeviceCall> gpu;
  {
    const cuda::CurrentDevice second(1);
    gpu.emplace(call.a.in(), call.a.out(), call.a.options);
  }
  const cuda::Context before = current_context();
  forward(gpu->in, gpu->out, gpu->options);
  EXPECT_EQ(current_context(), before);
  const cuda::CurrentDevice second(1);
  call.a.o.poison();
  gpu->download();
  EXPECT_TRUE(call.a.o.same_bits(expected));
  gpu.reset();
}

/// Pages of 16 slots, 2 kv heads and 128 columns: from page 2^19 on their elements lie 2^31 and more from the first.
TEST_F(GpuStressCache, D14_pages_whose_elements_lie_beyond_2_31) {
  constexpr std::int64_t kPages = 20, kPool = (std::int64_t{1} << 19) + 40, kPageBytes = 16 * 2 * 128 * 2;
  if (const std::string reason = too_small(4 * kPool * kPageBytes); !reason.empty()) GTEST_SKIP() << reason;
  Attention a({1, 2, 1, 8, 2, 128, 128}, DType::bf16);
  const Array filled = int32_array({300});
  Array table(DType::int32, {1, kPages});
  a.k = std::move(Array(DType::bf16, {kPages, 16, 2, 128}).fill_gaussian(5));
  a.v = std::move(Array(DType::bf16, {kPages, 16, 2, 128}).fill_gaussian(6));
  const Array k_new = std::move(Array(DType::bf16, {1, 2, 2, 128}).fill_gaussian(7));
  table.fill([](const Dims& at) { return static_cast<double>(at[1]); });
  a.options.cache_seqlens = filled;
  a.options.block_table = table;
  a.options.k_new = a.options.v_new = k_new;
  a.options.causal = Causal::bottom_right;
  a.options.family = "sm80";
  const Array k_before = a.k, v_before = a.v;
  run(a);
  const Array o = a.o, lse = a.lse, k_after = a.k;

  // Page i becomes one of those around the border, or the last.
  const auto place = [](std::int64_t i) { return i == 18 ? kPool - 1 : (std::int64_t{1} << 19) - 9 + i; };
  table.fill([&](const Dims& at) { return static_cast<double>(place(at[1])); });
  DeviceBlock k(kPool * kPageBytes), v(kPool * kPageBytes);
  a.o.poison();
  a.lse.poison();
  DeviceCall gpu(a.in(), a.out(), a.options);
  for (std::int64_t i = 0; i < kPages; ++i) {
    const auto page = [&](const Array& from) {
      return static_cast<const std::byte*>(from.tensor().data) + i * kPageBytes;
    };
    k.upload(page(k_before), kPageBytes, place(i) * kPageBytes);
    v.upload(page(v_before), kPageBytes, place(i) * kPageBytes);
  }
  for (const auto& [tensor, block] : {std::pair{&gpu.in.k, &k}, std::pair{&gpu.in.v, &v}})
    *tensor = {block->data(), DType::bf16, {kPool, 16, 2, 128}, {}, tensor->device};
  gpu.run();
  gpu.download();
  EXPECT_EQ(gpu.status().code, 0);
  EXPECT_TRUE(a.o.same_bits(o) && a.lse.same_bits(lse));
  std::vector<std::byte> page(kPageBytes);
  k.download(page.data(), kPageBytes, (kPool - 1) * kPageBytes);  // slots 288..303, where the new keys went
  EXPECT_EQ(
      std::memcmp(page.data(), static_cast<const std::byte*>(k_after.tensor().data) + 18 * kPageBytes, page.size()), 0);
  EXPECT_TRUE(k.margins_intact() && v.margins_intact());
}

TEST_F(GpuStressCache, rows_more_than_2_31_elements_apart) {
  if (const std::string reason = too_small(std::int64_t{40} << 30); !reason.empty()) GTEST_SKIP() << reason;
  for (std::size_t wide = 0; wide < 3; ++wide) {
    SCOPED_TRACE(wide);
    Attention a({2, 5, 70, 6, 3, 64, 64}, DType::bf16);
    const Array filled = int32_array({70, 33});
    a.options.cache_seqlens = filled;
    a.options.causal = Causal::bottom_right;
    a.options.family = "sm80";
    DeviceCall gpu(a.in(), a.out(), a.options);
    Spread q(a.q, wide), k(a.k, wide), v(a.v, wide), o(a.o, wide), lse(a.lse, wide == 2 ? 1 : 0);
    o.poison();
    lse.poison();
    forward({q.tensor(), k.tensor(), v.tensor()}, {o.tensor(), lse.tensor()}, gpu.options);
    wait_for_device();
    o.download();
    lse.download();
    expect_within_bounds(a);
    EXPECT_TRUE(o.margins_intact() && lse.margins_intact());
  }
}

/// D11's (65536, 16, 80) and D09's 65536 sequences of 8 heads. With Q = 0 a row is the mean of V = 1, its LSE the
/// logarithm of its keys.
TEST_F(GpuStressCache, D09_D11_more_than_65535_sequences) {
  for (const auto& [heads, width] : {std::pair<std::int64_t, std::int64_t>{8, 64}, {16, 80}}) {
    constexpr std::int64_t kSequences = 65536, kSlots = 4;
    const std::int64_t kv_heads = heads / 4, rows = kSequences * heads;
    std::vector<double> lengths(kSequences);
    for (std::size_t s = 0; s < lengths.size(); ++s) lengths[s] = static_cast<double>(s % 5);
    const Array filled = int32_array(lengths);
    const Mirror filled_gpu(filled);
    DeviceBlock q(rows * width * 2), cache(kSequences * kSlots * kv_heads * width * 2), o(rows * width * 2),
        lse(rows * 4);
    q.fill(0);
    const std::vector<std::uint16_t> ones(static_cast<std::size_t>(cache.bytes() / 2), 0x3c00);
    cache.upload(ones.data(), cache.bytes());
    const Device device{DeviceKind::cuda, 0};
    const Tensor k{cache.data(), DType::fp16, {kSequences, kSlots, kv_heads, width}, {}, device};
    const Dims shape{kSequences, 1, heads, width};
    Options options;
    options.cache_seqlens = filled_gpu.tensor();
    options.family = "sm80";
    forward({{q.data(), DType::fp16, shape, {}, device}, k, k},
            {{o.data(), DType::fp16, shape, {}, device}, {lse.data(), DType::fp32, {kSequences, heads, 1}, {}, device}},
            options);
    wait_for_device();
    std::vector<float> sums(static_cast<std::size_t>(rows));
    std::vector<std::uint16_t> results(static_cast<std::size_t>(rows * width));
    lse.download(sums.data(), lse.bytes());
    o.download(results.data(), o.bytes());
    std::int64_t wrong = 0;
    for (std::int64_t row = 0; row < rows; ++row) {
      const auto keys = static_cast<float>(row / heads % 5);
      const float found = sums[static_cast<std::size_t>(row)], expected = std::log(keys);
      wrong += keys == 0 ? found != expected : !(std::abs(found - expected) < 1e-5f);
      const std::uint16_t bits = keys == 0 ? 0 : 0x3c00;
      const auto begin = results.begin() + row * width;
      wrong += std::count(begin, begin + width, bits) != width;
    }
    EXPECT_EQ(wrong, 0) << heads << " heads";
  }
}

}  // namespace
}  // namespace narrows::test
