// Every row of tests/cases.jsonl on every GPU family that must accept it: against the oracle, by counting, and bit for bit.
// Lengths are on the device; what lies beside a tensor faults or is watched.
#include "cpu/reference.hpp"
#include "tests/gpu/device_call.hpp"
#include "tests/gpu/family_cases.hpp"
#include "tests/gpu/turned_first.hpp"
#include "tests/support/case_probe.hpp"

namespace narrows::test {
namespace {

class GpuCases : public OnGpu<testing::TestWithParam<FamilyCase>> {
 protected:
  std::string_view family() const override { return GetParam().family; }
  void SetUp() override {
    OnGpu::SetUp();
    if (IsSkipped()) return;
    row_ = make_case(GetParam().index);
    row_.call.options.family = GetParam().family;
  }
  Case row_;
};

TEST_P(GpuCases, forward_meets_the_criterion) {
  SCOPED_TRACE(row_.name());
  const Inputs in = inputs(row_);
  DeviceCall gpu(in, row_.call.out(), row_.call.options);
  gpu.run();
  gpu.download();
  EXPECT_TRUE(turned_agrees(in, row_.call.out(), row_.call.options));
  EXPECT_TRUE(row_.call.o.gaps_intact());
  EXPECT_TRUE(row_.call.lse.gaps_intact());
  EXPECT_TRUE(gpu.surroundings_intact());
  EXPECT_EQ(gpu.status().code, 0);
}

/// Memory that ends where the tensor does has the item's alignment alone, so rows are gathered or copied in small pieces.
class GpuUnalignedCases : public GpuCases {};
TEST_P(GpuUnalignedCases, meet_the_criterion) {
  SCOPED_TRACE(row_.name());
  const Inputs in = inputs(row_);
  DeviceCall gpu(in, row_.call.out(), row_.call.options, Placement::flush);
  gpu.run();
  gpu.download();
  EXPECT_TRUE(turned_agrees(in, row_.call.out(), row_.call.options));
  EXPECT_TRUE(row_.call.o.gaps_intact());
  EXPECT_TRUE(gpu.surroundings_intact());
}

TEST_P(GpuCases, counting_probe_sees_exactly_the_visible_keys) {
  SCOPED_TRACE(row_.name());
  make_counting(row_);
  const Inputs in = inputs(row_);
  DeviceCall gpu(in, row_.call.out(), row_.call.options);
  gpu.run();
  gpu.download();
  expect_counts(row_, in, reference::exact_forward(in, row_.call.options));
}

TEST_P(GpuCases, bits_repeat) {
  SCOPED_TRACE(row_.name());
  DeviceCall gpu(inputs(row_), row_.call.out(), row_.call.options);
  gpu.run();
  gpu.download();
  const Array o = row_.call.o, lse = row_.call.lse;
  for (int repeat = 0; repeat < 3; ++repeat) {
    row_.call.o.poison();
    row_.call.lse.poison();
    gpu.run();
    gpu.download();
    EXPECT_TRUE(row_.call.o.same_bits(o));
    EXPECT_TRUE(row_.call.lse.same_bits(lse));
  }
}

INSTANTIATE_TEST_SUITE_P(table, GpuCases, testing::ValuesIn(family_cases(Operation::forward)), case_name);
INSTANTIATE_TEST_SUITE_P(table, GpuUnalignedCases, testing::ValuesIn(family_cases(Operation::forward, {"sm80"})),
                         case_name);

}  // namespace
}  // namespace narrows::test
