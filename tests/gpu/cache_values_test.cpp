// Values that break kernels which are right on Gaussian noise, in a cache and where keys are split: the parts of a row
// are joined.
#include "tests/gpu/paged.hpp"

#include <array>
#include <limits>

namespace narrows::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

class GpuCacheValues : public OnGpu<testing::TestWithParam<DType>> {
 protected:
  static DType dtype() { return GetParam(); }

  /// Keys in a cache of one sequence, of which all slots are filled.
  void run(Attention& a, int splits) {
    filled_ = int32_array({static_cast<double>(a.k.shape()[1])});
    a.options.cache_seqlens = filled_;
    a.options.num_splits = splits;
    a.options.family = "sm80";
    a.o.poison();
    a.lse.poison();
    DeviceCall gpu(a.in(), a.out(), a.options);
    gpu.run();
    gpu.download();
    EXPECT_EQ(gpu.status().code, 0);
    EXPECT_TRUE(gpu.surroundings_intact());
  }

 private:
  Array filled_;
};

constexpr std::array kSplits{0, 1, 2, 7};

/// q k = -524288 for every key.
TEST_P(GpuCacheValues, B01_equal_logits_far_below_0) {
  if (dtype() == DType::fp32) GTEST_SKIP() << "a product of tf32 parts is not exact";
  for (const std::int64_t keys : {2, 700})
    for (const int splits : kSplits) {
      SCOPED_TRACE(testing::Message() << keys << " keys, " << splits << " splits");
      Attention a({1, 1, keys, 2, 1, 128, 128}, dtype());
      a.q.fill(64);
      a.k.fill(-64);
      a.v.fill(1);
      run(a, splits);
      for (const double x : a.o.values()) ASSERT_EQ(x, 1);
      const double logit = -524288 / std::sqrt(128.0);
      for (const double x : a.lse.values())
        ASSERT_NEAR(x, logit + std::log(static_cast<double>(keys)), 2e-5 * (1 - logit / 8));
    }
}

/// The raw logits of every other head are from -243712 to -215040, exactly; the others' are as large above 0.
TEST_P(GpuCacheValues, B03_a_row_of_logits_far_below_0) {
  if (dtype() == DType::fp32) GTEST_SKIP() << "a product of tf32 parts is not exact";
  for (const int splits : kSplits) {
    SCOPED_TRACE(splits);
    Attention a({1, 3, 500, 4, 2, 128, 64}, dtype());
    a.q.fill([](const Dims& at) { return at[2] % 2 ? 448 : -448; });
    a.k.fill([](const Dims& at) { return at[3] == at[1] % 128 ? 8.0 * (60 + static_cast<double>(at[1] % 9)) : 0; });
    run(a, splits);
    ASSERT_NO_FATAL_FAILURE(expect_within_bounds(a));
    for (const double x : a.o.values()) ASSERT_NE(x, 0);
  }
}

TEST_P(GpuCacheValues, B04_equal_rows_of_large_values_give_v) {
  if (dtype() == DType::fp16) GTEST_SKIP() << "133120 is beyond fp16";
  for (const std::int64_t keys : {1, 600})
    for (const int splits : kSplits) {
      Attention a({1, 1, keys, 1, 1, 64, 64}, dtype());
      for (Array* array : {&a.q, &a.k, &a.v}) array->fill(133120);
      run(a, splits);
      const double rounding = dtype() == DType::fp32 ? 133120 * 0x1p-22 : 0;
      for (const double x : a.o.values()) ASSERT_NEAR(x, 133120, rounding) << keys << " keys, " << splits << " splits";
    }
}

/// Logits of +-1e30 (fp16: 1e9) in one part of the keys and 0 in the others: the largest takes all.
TEST_P(GpuCacheValues, parts_whose_maxima_lie_far_apart) {
  const double size = dtype() == DType::fp16 ? 3e4 : 1e15;
  for (const int splits : kSplits) {
    SCOPED_TRACE(splits);
    Attention a({1, 6, 450, 1, 1, 16, 16}, dtype());
    a.q.fill([&](const Dims& at) { return at[3] == 0 ? (at[1] % 2 ? size : -size) : 0; });
    a.k.fill([&](const Dims& at) { return at[3] == 0 ? (at[1] == 11 ? size : at[1] == 440 ? -size : 0) : 0; });
    a.options.scale = 1;
    run(a, splits);
    const double rounding = dtype() == DType::fp32 ? 0x1p-21 : 0;  // fp32 products are sums of tf32 ones, 22 bits of V
    a.o.for_each([&](const Dims& at) {
      const double value = a.v[{0, at[1] % 2 ? 11 : 440, 0, at[3]}];
      ASSERT_NEAR(a.o[at], value, rounding * std::abs(value)) << at[1];
    });
  }
}

/// Four queries of two heads share the packed rows of one product.
TEST_P(GpuCacheValues, H22_nan_in_a_query_row_stays_there) {
  for (const int splits : kSplits) {
    Attention a({1, 4, 300, 2, 1, 64, 64}, dtype());
    run(a, splits);
    const Array o = a.o, lse = a.lse;
    a.q.set({0, 2, 1, 5}, kNan);
    run(a, splits);
    a.o.for_each([&](const Dims& at) {
      const bool hit = at[1] == 2 && at[2] == 1;
      ASSERT_TRUE(hit ? std::isnan(a.o[at]) : a.o[at] == o[at]) << to_text(at) << ", " << splits << " splits";
    });
    a.lse.for_each([&](const Dims& at) {
      const bool hit = at[2] == 2 && at[1] == 1;
      ASSERT_TRUE(hit ? std::isnan(a.lse[at]) : a.lse[at] == lse[at]) << to_text(at);
    });
  }
}

/// H22: what a padding query has written is NaN; rows that see no key share the product with one that sees it.
TEST_P(GpuCacheValues, rows_without_keys_are_0_beside_values_that_are_nan) {
  Attention a({1, 5, 2, 2, 1, 64, 64}, dtype());
  a.options.causal = Causal::bottom_right;
  a.v.set({0, 0, 0, 7}, kNan);
  run(a, 1);
  a.o.for_each([&](const Dims& at) {
    if (at[1] < 3)
      ASSERT_EQ(a.o[at], 0) << to_text(at);
    else
      ASSERT_EQ(std::isnan(a.o[at]), at[3] == 7) << to_text(at);
  });
  for (std::int64_t row = 0; row < 3; ++row) EXPECT_EQ((a.lse[{0, 1, row}]), -kInfinity);
}

std::string type_name(const testing::TestParamInfo<DType>& info) { return std::string(name(info.param)); }
INSTANTIATE_TEST_SUITE_P(All, GpuCacheValues, testing::Values(DType::bf16, DType::fp16, DType::fp32), type_name);

}  // namespace
}  // namespace narrows::test
