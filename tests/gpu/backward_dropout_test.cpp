// Backward drops on a GPU exactly what the CPU drops: with P the same on all keys and one-hot gradients, each kept pair is an
// element of dV.
#include "tests/gpu/device_call.hpp"
#include "tests/support/check.hpp"

namespace narrows::test {
namespace {

class GpuBackwardDropout : public OnGpu<testing::TestWithParam<DType>> {};

struct Draw {
  double p;
  std::uint64_t seed, offset;
  Origin origin;
  Causal causal;
};
const std::vector<Draw> kDraws{{0.1, 1234567890123, 0, {}, Causal::none},
                               {0.48, 7, 4294967295, {}, Causal::bottom_right},
                               {0.9, 0xFFFFFFFFFFFFFFFFull, 3, {2, 5, 1000, 3003, 16}, Causal::none}};

/// dV of a key: a column for each row from `first` on.
void make_visible(Attention& a, std::int64_t first) {
  for (Array* array : {&a.q, &a.k, &a.v, &a.o, &a.lse}) array->fill(0);
  a.dout.fill([&](const Dims& at) { return at[1] - first == at[3] ? 1.0 : 0.0; });
  a.options.scale = 1;
}

void set_draw(Attention& a, const Draw& draw) {
  a.options.dropout = draw.p;
  a.options.seed = draw.seed;
  a.options.offset = draw.offset;
  a.options.origin = draw.origin;
  a.options.causal = draw.causal;
}

void run(Attention& a) {
  DeviceBackward gpu(a.backward_in(), a.gradients(), a.options);
  gpu.options.family = "sm80";
  gpu.run();
  gpu.download();
  EXPECT_TRUE(gpu.surroundings_intact());
}

void expect_same_mask(const Array& ours, const Array& theirs) {
  std::int64_t kept = 0;
  ours.for_each([&](const Dims& at) {
    ASSERT_EQ(ours[at] != 0, theirs[at] != 0) << at[0] << " key " << at[1] << " head " << at[2] << " row " << at[3];
    kept += ours[at] != 0;
  });
  EXPECT_GT(kept, 0);
}

TEST_P(GpuBackwardDropout, drops_what_the_cpu_drops) {
  for (const Draw& draw : kDraws)
    for (const std::int64_t first : {0, 100, 200}) {
      Attention a({2, 300, 330, 2, 2, 24, 100}, GetParam());
      make_visible(a, first);
      set_draw(a, draw);
      backward(a.backward_in(), a.gradients(), a.options);
      const Array expected = a.dv;
      a.dv.poison();
      run(a);
      ASSERT_NO_FATAL_FAILURE(expect_same_mask(a.dv, expected));
    }
}

TEST_P(GpuBackwardDropout, gradients_meet_the_criterion) {
  for (const Draw& draw : kDraws) {
    Attention a({2, 90, 150, 4, 2, 64, 48}, GetParam());
    set_draw(a, draw);
    forward(a.in(), a.out(), a.options);
    run(a);
    EXPECT_TRUE(backward_agrees(a.backward_in(), a.gradients(), a.options));
  }
}

TEST_P(GpuBackwardDropout, seed_and_offset_are_read_on_the_device) {
  Attention a({2, 90, 130, 2, 1, 24, 90}, GetParam());
  make_visible(a, 0);
  a.options.dropout = 0.3;
  a.options.seed = 1234567890123;
  a.options.offset = 77;
  backward(a.backward_in(), a.gradients(), a.options);
  const Array expected = a.dv;
  const Array seed(DType::int64, {1}, {1234567890123.0}), offset(DType::int64, {1}, {77.0});
  a.options.seed = Number(seed.tensor());
  a.options.offset = Number(offset.tensor());
  a.dv.poison();
  run(a);
  expect_same_mask(a.dv, expected);
}

INSTANTIATE_TEST_SUITE_P(All, GpuBackwardDropout, testing::Values(DType::bf16, DType::fp16, DType::fp32),
                         [](const testing::TestParamInfo<DType>& info) { return std::string(name(info.param)); });

}  // namespace
}  // namespace narrows::test
