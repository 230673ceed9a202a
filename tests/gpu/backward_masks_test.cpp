// Counting of gradients over every mask rule, layout and type on a GPU.
#include "tests/gpu/device_call.hpp"
#include "tests/support/counting_backward.hpp"

namespace narrows::test {
namespace {

class GpuBackwardCounting : public OnGpu<testing::TestWithParam<CountingLayout>> {};

/// Sizes cross tiles of 32 to 128 rows and keys.
TEST_P(GpuBackwardCounting, every_mask_counts_exactly_its_pairs) {
  for (const CountingRule& rule : counting_rules())
    for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
      for (const Dims& size : {Dims{150, 333}, Dims{270, 140}, Dims{1, 70}})
        for (const CountedGradient which : {CountedGradient::dq, CountedGradient::dk, CountedGradient::dv}) {
          SCOPED_TRACE(text(rule.name, " ", name(dtype), " gradient ", static_cast<int>(which)));
          Counting c(rule, GetParam(), dtype, size[0], size[1]);
          make_counting(c, which);
          DeviceBackward gpu(c.a.backward_in(), c.a.gradients(), c.a.options);
          gpu.options.family = "sm80";
          gpu.run();
          gpu.download();
          EXPECT_TRUE(gpu.surroundings_intact());
          EXPECT_EQ(gpu.status().code, 0);
          ASSERT_NO_FATAL_FAILURE(expect_counted(c, which));
        }
}

INSTANTIATE_TEST_SUITE_P(All, GpuBackwardCounting, kCountingLayouts, layout_name);

}  // namespace
}  // namespace narrows::test
