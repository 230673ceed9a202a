// Inputs whose rows overlap: strides may be anything.
#include "tests/gpu/device_call.hpp"
#include "tests/support/check.hpp"

namespace narrows::test {
namespace {

using GpuFamilyLayouts = GpuFamilyTest;

/// Row i of q begins 8 elements behind row i - 1, row j of k and v 16: windows over one signal.
TEST_P(GpuFamilyLayouts, rows_that_overlap) {
  for (const DType dtype : {DType::bf16, DType::fp16}) {
    const std::int64_t queries = 150, keys = 200, heads = 2, d = 64;
    Attention a({1, queries, keys, heads, heads, d, d}, dtype);
    const Array signal = std::move(Array(dtype, {8192}).fill_gaussian(3));
    const auto view = [&](std::int64_t first, std::int64_t rows, std::int64_t step) {
      return Tensor{static_cast<std::byte*>(signal.tensor().data) + 2 * first,
                    dtype,
                    {1, rows, heads, d},
                    {0, step, rows * step + d, 1},
                    {}};
    };
    const Inputs in{view(0, queries, 8), view(128, keys, 16), view(256, keys, 16)};
    a.options.causal = Causal::bottom_right;
    a.options.family = family();
    DeviceCall gpu(in, a.out(), a.options);
    gpu.run();
    gpu.download();
    EXPECT_TRUE(forward_agrees(in, a.out(), a.options));
    EXPECT_TRUE(gpu.surroundings_intact());
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuFamilyLayouts, kGpuFamilies, family_name);

}  // namespace
}  // namespace narrows::test
