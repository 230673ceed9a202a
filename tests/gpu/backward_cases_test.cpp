// Every row of tests/cases.jsonl backward on every GPU family that must accept it: against the oracle, bit for bit where that is
// promised, and each gradient alone. Lengths are on the device; what lies beside a tensor faults or is watched.
#include "cpu/reference.hpp"
#include "tests/gpu/device_call.hpp"
#include "tests/gpu/family_cases.hpp"
#include "tests/support/backward_case.hpp"
#include "tests/support/check.hpp"

namespace narrows::test {
namespace {

class GpuBackwardCases : public OnGpu<testing::TestWithParam<FamilyCase>> {
 protected:
  std::string_view family() const override { return GetParam().family; }
  /// With o and lse of the oracle.
  void make(const Arrangement& arrangement = {}) {
    c_ = BackwardRow(GetParam().index, arrangement);
    c_.row.call.options.family = GetParam().family;
    reference::forward(c_.forward_in(), c_.row.call.out(), c_.options());
  }
  void expect_right(Placement placement) {
    SCOPED_TRACE(c_.row.name());
    DeviceBackward gpu(c_.in, c_.out, c_.options(), placement);
    gpu.run();
    gpu.download();
    EXPECT_TRUE(backward_agrees(c_.in, c_.out, c_.options()));
    for (const Array& array : c_.results) EXPECT_TRUE(array.gaps_intact());
    EXPECT_TRUE(gpu.surroundings_intact());
    EXPECT_EQ(gpu.status().code, 0);
  }
  BackwardRow c_;
};

TEST_P(GpuBackwardCases, meet_the_criterion) {
  make();
  expect_right(Placement::aligned);
}

/// Memory that ends where the tensor does has the item's alignment alone, and gaps make rows begin anywhere.
class GpuUnalignedBackwardCases : public GpuBackwardCases {};
TEST_P(GpuUnalignedBackwardCases, meet_the_criterion) {
  make({.order = {}, .gap = 3});
  expect_right(Placement::flush);
}

TEST_P(GpuBackwardCases, deterministic_calls_meet_the_criterion_and_repeat) {
  make();
  c_.row.call.options.deterministic = true;
  expect_right(Placement::aligned);
  const std::deque<Array> first = c_.results;
  DeviceBackward gpu(c_.in, c_.out, c_.options());
  for (int repeat = 0; repeat < 3; ++repeat) {
    c_.poison();
    gpu.run();
    gpu.download();
    for (std::size_t x = 0; x < first.size(); ++x) EXPECT_TRUE(c_.results[x].same_bits(first[x])) << x;
  }
}

TEST_P(GpuBackwardCases, each_gradient_alone_has_the_bits_of_all) {
  make();
  c_.row.call.options.deterministic = true;
  DeviceBackward gpu(c_.in, c_.out, c_.options());
  gpu.run();
  gpu.download();
  const std::deque<Array> all = c_.results;
  std::size_t x = 0;
  for (Tensor Gradients::*member :
       {&Gradients::dq, &Gradients::dk, &Gradients::dv, &Gradients::dbias, &Gradients::dslopes, &Gradients::dsinks}) {
    if (!(c_.out.*member).given()) continue;
    Gradients one;
    one.*member = c_.out.*member;
    c_.poison();
    DeviceBackward alone(c_.in, one, c_.options());
    alone.run();
    alone.download();
    EXPECT_TRUE(c_.results[x].same_bits(all[x])) << "gradient " << x;
    EXPECT_TRUE(alone.surroundings_intact());
    ++x;
  }
}

INSTANTIATE_TEST_SUITE_P(table, GpuBackwardCases, testing::ValuesIn(family_cases(Operation::backward)), case_name);
INSTANTIATE_TEST_SUITE_P(table, GpuUnalignedBackwardCases,
                         testing::ValuesIn(family_cases(Operation::backward, {"sm80"})), case_name);

}  // namespace
}  // namespace narrows::test
