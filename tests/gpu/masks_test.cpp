// Counting over every mask rule, layout and type on a GPU.
#include "tests/gpu/device_call.hpp"
#include "tests/support/counting.hpp"

namespace narrows::test {
namespace {

class GpuCounting : public OnGpu<testing::TestWithParam<std::tuple<CountingLayout, std::string>>> {
 protected:
  std::string_view family() const override { return std::get<1>(GetParam()); }
  CountingLayout layout() const { return std::get<0>(GetParam()); }
  /// Of a family that does not take them all.
  bool takes(const CountingRule& rule, DType dtype) const {
    return family() == "sm80" ||
           (dtype != DType::fp32 && !rule.masked && !rule.bias && !rule.key_begin && !rule.key_end);
  }
  /// The counted rows in the host's arrays.
  void run(Counting& c) const {
    DeviceCall gpu(c.a.in(), c.a.out(), c.a.options);
    gpu.options.family = family();
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
        if (!takes(rule, dtype)) continue;
        SCOPED_TRACE(rule.name + " " + std::string(name(dtype)));
        Counting c(rule, layout(), dtype, size[0], size[1]);
        run(c);
        ASSERT_NO_FATAL_FAILURE(expect_counted(c));
      }
}

TEST_P(GpuCounting, C08_rows_of_no_sequence_are_zero_and_minus_infinity) {
  for (const DType dtype : {DType::bf16, DType::fp32}) {
    if (!takes(counting_rules()[1], dtype)) continue;
    Counting c(counting_rules()[1], layout(), dtype, 140, 40);
    run(c);
    expect_blank_rows(c);
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuCounting, testing::Combine(kCountingLayouts, kGpuFamilies), [](const auto& info) {
  return layout_name({std::get<0>(info.param), info.index}) + "_" + std::get<1>(info.param);
});

}  // namespace
}  // namespace narrows::test
