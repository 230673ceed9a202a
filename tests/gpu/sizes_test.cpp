// Sizes beyond 32 bits: offsets, and more heads and batch rows than a grid's second axis could count.
#include "tests/gpu/spread.hpp"
#include "tests/support/check.hpp"

#include <algorithm>
#include <array>
#include <cmath>

namespace narrows::test {
namespace {

using GpuStressSizes = GpuTest;
using GpuFamilyStressSizes = GpuFamilyTest;

/// wide: of q, k, v and o (b, s, h, d).
void expect_right_with_far_rows(std::size_t wide, DType dtype, std::string_view family) {
  Attention a({2, 5, 70, 6, 3, 64, 64}, dtype);
  a.options.causal = Causal::bottom_right;
  a.options.family = family;
  Spread q(a.q, wide), k(a.k, wide), v(a.v, wide), o(a.o, wide), lse(a.lse, wide == 2 ? 1 : 0);
  o.poison();
  lse.poison();
  Options options = a.options;
  forward({q.tensor(), k.tensor(), v.tensor()}, {o.tensor(), lse.tensor()}, options);
  wait_for_device();
  o.download();
  lse.download();
  EXPECT_TRUE(forward_agrees(a.in(), a.out(), a.options));
  EXPECT_TRUE(o.margins_intact() && lse.margins_intact());
}

TEST_P(GpuFamilyStressSizes, rows_more_than_2_31_elements_apart) {
  if (const std::string reason = too_small(std::int64_t{60} << 30); !reason.empty()) GTEST_SKIP() << reason;
  for (std::size_t wide = 0; wide < 3; ++wide)
    for (const DType dtype : {DType::bf16, DType::fp32}) {
      if (family() == "sm90" && dtype == DType::fp32) continue;
      SCOPED_TRACE(text("axis ", wide, " ", name(dtype)));
      expect_right_with_far_rows(wide, dtype, family());
    }
}

TEST_F(GpuStressSizes, bias_and_mask_rows_more_than_2_31_elements_apart) {
  if (const std::string reason = too_small(std::int64_t{30} << 30); !reason.empty()) GTEST_SKIP() << reason;
  for (std::size_t wide = 0; wide < 3; ++wide) {
    SCOPED_TRACE(wide);
    Attention a({2, 5, 70, 4, 2, 64, 64}, DType::bf16);
    a.options.family = "sm80";
    const Array bias = std::move(Array(DType::fp32, {2, 4, 5, 70}).fill_gaussian(5));
    const Array mask = std::move(Array(DType::boolean, {2, 4, 5, 70}).fill([](const Dims& at) {
      return (at[0] + at[1] + at[2] + at[3]) % 3 != 0 ? 1.0 : 0.0;
    }));
    a.options.bias = bias;
    a.options.mask = mask;
    Spread far_bias(bias, wide), far_mask(mask, wide);
    DeviceCall gpu(a.in(), a.out(), a.options);
    gpu.options.bias = far_bias.tensor();
    gpu.options.mask = far_mask.tensor();
    gpu.run();
    gpu.download();
    EXPECT_TRUE(forward_agrees(a.in(), a.out(), a.options));
  }
}

/// One tensor of more than 2^31 elements without gaps. With Q = 0 every row is the mean of V, and LSE the logarithm of the keys.
TEST_P(GpuFamilyStressSizes, more_than_2_31_elements_of_q_and_o) {
  if (const std::string reason = too_small(std::int64_t{16} << 30); !reason.empty()) GTEST_SKIP() << reason;
  const std::int64_t rows = (std::int64_t{1} << 24) + 300, h = 2, d = 64, keys = 48, tail = 1000;
  const Array k = std::move(Array(DType::bf16, {1, keys, 1, d}).fill_gaussian(1));
  const Array v =
      std::move(Array(DType::bf16, {1, keys, 1, d}).fill([](const Dims& at) { return at[1] % 2 ? 1.5 : 0.5; }));
  DeviceBlock q(rows * h * d * 2), o(rows * h * d * 2), lse(rows * h * 4);
  q.fill(0);
  const Mirror k_gpu(k), v_gpu(v);
  const Device device{DeviceKind::cuda, 0};
  Options options;
  options.family = family();
  forward({{q.data(), DType::bf16, {1, rows, h, d}, {}, device}, k_gpu.tensor(), v_gpu.tensor()},
          {{o.data(), DType::bf16, {1, rows, h, d}, {}, device}, {lse.data(), DType::fp32, {1, h, rows}, {}, device}},
          options);
  wait_for_device();
  std::vector<float> all(static_cast<std::size_t>(rows * h));
  lse.download(all.data(), lse.bytes());
  const float expected = std::log(static_cast<float>(keys));
  EXPECT_EQ(std::count_if(all.begin(), all.end(), [&](float x) { return std::abs(x - expected) < 1e-5f; }), rows * h);
  for (const std::int64_t first : {std::int64_t{0}, rows - tail}) {
    std::vector<std::uint16_t> some(static_cast<std::size_t>(tail * h * d));
    o.download(some.data(), tail * h * d * 2, first * h * d * 2);
    EXPECT_EQ(std::count(some.begin(), some.end(), bf16_bits(1)), tail * h * d) << "from row " << first;
  }
  EXPECT_TRUE(o.margins_intact() && lse.margins_intact());
}

/// fp32, because the criterion is held against each row: of this many rows with 8 numbers each the plain computation in bf16
/// hits one almost exactly, by chance, and twice its error in that row is then less than the rounding of one weight.
TEST_F(GpuStressSizes, more_than_65535_heads_and_batch_rows) {
  Attention a({16400, 2, 5, 5, 5, 8, 8}, DType::fp32);
  a.options.family = "sm80";
  DeviceCall gpu(a.in(), a.out(), a.options);
  gpu.run();
  gpu.download();
  EXPECT_TRUE(forward_agrees(a.in(), a.out(), a.options));
  EXPECT_TRUE(gpu.surroundings_intact());
}

TEST_F(GpuStressSizes, more_than_65535_sequences) {
  constexpr std::int64_t kSequences = 70000;
  std::vector<double> bounds(kSequences + 1);
  for (std::size_t s = 0; s < bounds.size(); ++s) bounds[s] = static_cast<double>(s);
  const Array cu = int32_array(bounds);
  Attention a = Attention::packed({1, kSequences, kSequences, 1, 1, 8, 8}, DType::bf16);
  a.options.cu_seqlens_q = a.options.cu_seqlens_k = cu;
  a.options.family = "sm80";
  DeviceCall gpu(a.in(), a.out(), a.options);
  gpu.run();
  gpu.download();
  a.o.for_each([&](const Dims& at) { ASSERT_EQ(a.o[at], a.v[at]) << "sequence " << at[0]; });  // one key each
  EXPECT_EQ(gpu.status().code, 0);
}

/// With Q = 0 row i of a causal call is the mean of i + 1 rows of V, of which row j holds j: it is i / 2. fp16 has them exactly.
struct Means {
  static constexpr std::uint16_t kNumbers[]{0x0000, 0x3c00, 0x4000, 0x4200, 0x4400, 0x4500, 0x4600, 0x4700,
                                            0x4800, 0x4880, 0x4900, 0x4980, 0x4a00, 0x4a80, 0x4b00, 0x4b80};  // 0 .. 15
  static constexpr std::uint16_t kHalves[]{0x0000, 0x3800, 0x3c00, 0x3e00, 0x4000, 0x4100, 0x4200, 0x4300,
                                           0x4400, 0x4480, 0x4500, 0x4580, 0x4600, 0x4680, 0x4700, 0x4780};

  std::int64_t sequences, rows, heads, width;  // rows: of a sequence, up to 16; there is one kv head
  DeviceBlock q{sequences * rows * heads * width * 2}, kv{sequences * rows * width * 2},
      o{sequences * rows * heads * width * 2}, lse{sequences * rows * heads * 4};

  static Tensor tensor(const DeviceBlock& block, DType dtype, const Dims& shape) {
    return {block.data(), dtype, shape, {}, {DeviceKind::cuda, 0}};
  }

  void run(bool packed, Options options) {
    q.fill(0);
    std::vector<std::uint16_t> numbers(static_cast<std::size_t>(kv.bytes() / 2));
    for (std::size_t x = 0; x < numbers.size(); ++x) numbers[x] = kNumbers[static_cast<std::int64_t>(x) / width % rows];
    kv.upload(numbers.data(), kv.bytes());
    const auto shape = [&](std::int64_t count) {
      return packed ? Dims{sequences * rows, count, width} : Dims{sequences, rows, count, width};
    };
    const Tensor k = tensor(kv, DType::fp16, shape(1));
    options.causal = Causal::bottom_right;
    forward({tensor(q, DType::fp16, shape(heads)), k, k},
            {tensor(o, DType::fp16, shape(heads)),
             tensor(lse, DType::fp32, packed ? Dims{heads, sequences * rows} : Dims{sequences, heads, rows})},
            options);
    wait_for_device();
  }

  void expect_right(bool packed) const {
    std::vector<std::uint16_t> results(static_cast<std::size_t>(o.bytes() / 2));
    std::vector<float> sums(static_cast<std::size_t>(lse.bytes() / 4));
    o.download(results.data(), o.bytes());
    lse.download(sums.data(), lse.bytes());
    std::int64_t wrong = 0;
    for (std::int64_t row = 0; row < sequences * rows; ++row) {
      const auto begin = results.begin() + row * heads * width;
      wrong += std::count(begin, begin + heads * width, kHalves[row % rows]) != heads * width;
      for (std::int64_t h = 0; h < heads; ++h) {
        const std::int64_t place = packed ? h * sequences * rows + row : (row / rows * heads + h) * rows + row % rows;
        const float expected = std::log(static_cast<float>(row % rows + 1));
        wrong += !(std::abs(sums[static_cast<std::size_t>(place)] - expected) < 1e-5f);
      }
    }
    EXPECT_EQ(wrong, 0);
    EXPECT_TRUE(o.margins_intact() && lse.margins_intact());
  }
};

TEST_P(GpuFamilyStressSizes, D09_D11_more_than_65535_heads) {
  for (const auto& [batch, rows, heads, width] :
       {std::array<std::int64_t, 4>{65535, 4, 8, 64}, {65536, 4, 8, 64}, {65536, 16, 1, 80}}) {
    SCOPED_TRACE(testing::Message() << batch << " of " << rows << " rows");
    Means means{batch, rows, heads, width};
    Options options;
    options.family = family();
    means.run(false, options);
    means.expect_right(false);
  }
}

TEST_P(GpuFamilyStressSizes, D12_80000_packed_sequences) {
  constexpr std::int64_t kSequences = 80000, kRows = 16;
  std::vector<double> bounds(kSequences + 1);
  for (std::size_t s = 0; s < bounds.size(); ++s) bounds[s] = static_cast<double>(s * kRows);
  const Array cu = int32_array(bounds);
  const Mirror cu_gpu(cu);
  Means means{kSequences, kRows, 1, 64};
  Options options;
  options.cu_seqlens_q = options.cu_seqlens_k = cu_gpu.tensor();
  options.family = family();
  means.run(true, options);
  means.expect_right(true);
}

INSTANTIATE_TEST_SUITE_P(All, GpuFamilyStressSizes, kGpuFamilies, family_name);

}  // namespace
}  // namespace narrows::test
