// Dropout keeps on a GPU exactly what it keeps on the CPU: with Q = 0 and V = one-hot(j) each kept key is an element of O.
#include "tests/gpu/device_call.hpp"

namespace narrows::test {
namespace {

class GpuDropout : public OnGpu<testing::TestWithParam<DType>> {};

struct Draw {
  double p;
  std::uint64_t seed, offset;
  Origin origin;
  Causal causal;
};

/// The keys from `first` on that are kept, one element of O each.
void make_visible(Attention& a, std::int64_t first) {
  a.q.fill(0);
  a.v.fill([&](const Dims& at) { return at[1] - first == at[3] ? 1.0 : 0.0; });
}

void expect_same_mask(const Array& ours, const Array& theirs) {
  std::int64_t kept = 0;
  ours.for_each([&](const Dims& at) {
    ASSERT_EQ(ours[at] != 0, theirs[at] != 0) << at[0] << " " << at[1] << " " << at[2] << " key " << at[3];
    kept += ours[at] != 0;
  });
  EXPECT_GT(kept, 0);
}

TEST_P(GpuDropout, keeps_what_the_cpu_keeps) {
  const std::vector<Draw> draws{{0.1, 1234567890123, 0, {}, Causal::none},
                                {0.48, 7, 4294967295, {}, Causal::bottom_right},
                                {0.9, 0xFFFFFFFFFFFFFFFFull, 3, {2, 5, 1000, 3003, 16}, Causal::none}};
  for (const Draw& draw : draws)
    for (const std::int64_t first : {0, 200, 400, 600}) {
      Attention a({2, 150, 700, 4, 2, 24, 200}, GetParam());
      make_visible(a, first);
      a.options.dropout = draw.p;
      a.options.seed = draw.seed;
      a.options.offset = draw.offset;
      a.options.origin = draw.origin;
      a.options.causal = draw.causal;
      forward(a.in(), a.out(), a.options);
      const Array expected = a.o;
      a.o.poison();
      DeviceCall gpu(a.in(), a.out(), a.options);
      gpu.options.family = "sm80";
      gpu.run();
      gpu.download();
      ASSERT_NO_FATAL_FAILURE(expect_same_mask(a.o, expected));
    }
}

TEST_P(GpuDropout, seed_and_offset_are_read_on_the_device) {
  Attention a({2, 70, 130, 2, 1, 24, 130}, GetParam());
  make_visible(a, 0);
  a.options.dropout = 0.3;
  a.options.seed = 1234567890123;
  a.options.offset = 77;
  forward(a.in(), a.out(), a.options);
  const Array expected = a.o;
  const Array seed(DType::int64, {1}, {1234567890123.0}), offset(DType::int64, {1}, {77.0});
  a.options.seed = Number(seed.tensor());
  a.options.offset = Number(offset.tensor());
  a.o.poison();
  DeviceCall gpu(a.in(), a.out(), a.options);
  gpu.options.family = "sm80";
  gpu.run();
  gpu.download();
  expect_same_mask(a.o, expected);
  EXPECT_TRUE(gpu.surroundings_intact());
}

INSTANTIATE_TEST_SUITE_P(All, GpuDropout, testing::Values(DType::bf16, DType::fp16, DType::fp32),
                         [](const testing::TestParamInfo<DType>& info) { return std::string(name(info.param)); });

}  // namespace
}  // namespace narrows::test
