// Counting over every mask rule, layout and type on a GPU.
#include "tests/gpu/device_call.hpp"
#include "tests/support/counting.hpp"

namespace narrows::test {
namespace {

class GpuCounting : public OnGpu<testing::TestWithParam<CountingLayout>> {
 protected:
  /// The counted rows in the host's arrays.
  static void run(Counting& c) {
    DeviceCall gpu(c.a.in(), c.a.out(), c.a.options);
    gpu.options.family = "sm80";
    gpu.run();
    gpu.download();
    EXPECT_TRUE(gpu.surroundings_intact());
    EXPECT_EQ(gpu.status().code, 0);
  }
};

/// Sizes cross tiles of 128 queries and 128 keys, and of half and quarter that.
TEST_P(GpuCounting, every_mask_shows_exactly_its_keys) {
  for (const CountingRule& rule : counting_rules())
    for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
      for (const Dims& size : {Dims{150, 333}, Dims{270, 140}, Dims{1, 70}}) {
        SCOPED_TRACE(rule.name + " " + std::string(name(dtype)));
        Counting c(rule, GetParam(), dtype, size[0], size[1]);
        run(c);
        ASSERT_NO_FATAL_FAILURE(expect_counted(c));
      }
}

TEST_P(GpuCounting, C08_rows_of_no_sequence_are_zero_and_minus_infinity) {
  for (const DType dtype : {DType::bf16, DType::fp32}) {
    Counting c(counting_rules()[1], GetParam(), dtype, 140, 40);
    run(c);
    expect_blank_rows(c);
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuCounting, kCountingLayouts, layout_name);

}  // namespace
}  // namespace narrows::test
