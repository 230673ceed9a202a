// Counting of gradients over every mask rule, layout and type on a GPU.
#include "tests/gpu/device_call.hpp"
#include "tests/support/counting_backward.hpp"

namespace narrows::test {
namespace {

class GpuBackwardCounting : public OnGpu<testing::TestWithParam<std::tuple<CountingLayout, std::string>>> {
 protected:
  std::string_view family() const override { return std::get<1>(GetParam()); }
  /// Of a family that does not take them all.
  bool takes(const CountingRule& rule, DType dtype) const {
    return family() == "sm80" ||
           (dtype != DType::fp32 && !rule.masked && !rule.bias && !rule.key_begin && !rule.key_end);
  }
  void expect_counts(const CountingRule& rule, DType dtype, const Dims& size, CountedGradient which) const {
    Counting c(rule, std::get<0>(GetParam()), dtype, size[0], size[1]);
    make_counting(c, which);
    DeviceBackward gpu(c.a.backward_in(), c.a.gradients(), c.a.options);
    gpu.options.family = family();
    gpu.run();
    gpu.download();
    EXPECT_TRUE(gpu.surroundings_intact());
    EXPECT_EQ(gpu.status().code, 0);
    expect_counted(c, which);
  }
};

/// Sizes cross tiles of 32 to 128 rows and keys.
TEST_P(GpuBackwardCounting, every_mask_counts_exactly_its_pairs) {
  for (const CountingRule& rule : counting_rules())
    for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
      for (const Dims& size : {Dims{150, 333}, Dims{270, 140}, Dims{1, 70}})
        for (const CountedGradient which : {CountedGradient::dq, CountedGradient::dk, CountedGradient::dv}) {
          if (!takes(rule, dtype)) continue;
          SCOPED_TRACE(text(rule.name, " ", name(dtype), " gradient ", static_cast<int>(which)));
          ASSERT_NO_FATAL_FAILURE(expect_counts(rule, dtype, size, which));
        }
}

INSTANTIATE_TEST_SUITE_P(All, GpuBackwardCounting, testing::Combine(kCountingLayouts, kGpuFamilies),
                         [](const auto& info) {
                           return layout_name({std::get<0>(info.param), info.index}) + "_" + std::get<1>(info.param);
                         });

}  // namespace
}  // namespace narrows::test
