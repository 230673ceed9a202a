// Sizes beyond 32 bits: offsets, and more heads and batch rows than a grid's second axis could count.
#include "tests/gpu/device_call.hpp"
#include "tests/support/check.hpp"

#include <algorithm>
#include <cmath>

namespace narrows::test {
namespace {

using GpuStressSizes = GpuTest;
using GpuFamilyStressSizes = GpuFamilyTest;

/// A tensor whose rows lie far apart on the device. Its last axis stays whole; between the rows nothing is ever written.
class Spread {
 public:
  /// wide: the axis whose last index is more than 2^31 elements from its first.
  Spread(const Tensor& host, std::size_t wide) : host_(host), device_(host) {
    const std::int64_t item = static_cast<std::int64_t>(item_size(host.dtype));
    const std::int64_t steps = host.shape[wide] - 1;
    device_.strides[wide] = ((std::int64_t{1} << 31) / steps / 64 + 1) * 64;
    block_.emplace((last(device_) + host.shape[host.shape.rank() - 1]) * item);
    device_.data = block_->data();
    device_.device = {DeviceKind::cuda, 0};
    each_row([&](std::int64_t from, std::int64_t to, std::int64_t bytes) {
      block_->upload(static_cast<const std::byte*>(host_.data) + from, bytes, to);
    });
  }
  Tensor tensor() const { return device_; }
  void poison() { block_->fill(0xFF); }
  void download() const {
    each_row([&](std::int64_t from, std::int64_t to, std::int64_t bytes) {
      block_->download(static_cast<std::byte*>(host_.data) + from, bytes, to);
    });
  }
  bool margins_intact() const { return block_->margins_intact(); }

 private:
  static std::int64_t last(const Tensor& t) {
    std::int64_t place = 0;
    for (std::size_t axis = 0; axis + 1 < t.shape.rank(); ++axis) place += (t.shape[axis] - 1) * t.strides[axis];
    return place;
  }
  /// Calls visit(byte on the host, byte on the device, bytes) for each run of the last axis.
  template <class Visit> void each_row(const Visit& visit) const {
    const std::int64_t item = static_cast<std::int64_t>(item_size(host_.dtype));
    const std::size_t rank = host_.shape.rank();
    Dims rows = host_.shape;
    rows[rank - 1] = 1;
    Dims at = reference::first_of(rows);
    for (std::int64_t row = 0; row < reference::elements(rows); ++row, reference::advance(at, rows)) {
      std::int64_t from = 0, to = 0;
      for (std::size_t axis = 0; axis < rank; ++axis) {
        from += at[axis] * host_.strides[axis];
        to += at[axis] * device_.strides[axis];
      }
      visit(from * item, to * item, host_.shape[rank - 1] * item);
    }
  }

  Tensor host_, device_;
  std::optional<DeviceBlock> block_;
};

std::string too_small(std::int64_t bytes) {
  const std::int64_t free = free_device_bytes();
  return free >= bytes ? "" : text("needs ", bytes, " bytes of device memory, ", free, " are free");
}

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
TEST_F(GpuStressSizes, more_than_2_31_elements_of_q_and_o) {
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
  options.family = "sm80";
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

INSTANTIATE_TEST_SUITE_P(All, GpuFamilyStressSizes, kGpuFamilies, family_name);

}  // namespace
}  // namespace narrows::test
