// Backward plans for other GPUs, on this one.
#include "cpu/reference.hpp"
#include "cuda/run.hpp"
#include "plan/plan.hpp"
#include "tests/gpu/device_call.hpp"
#include "tests/gpu/machines.hpp"
#include "tests/support/backward_case.hpp"
#include "tests/support/check.hpp"

#include <set>

namespace narrows::test {
namespace {

class GpuBackwardPlans : public OnGpu<testing::TestWithParam<std::size_t>> {};

std::vector<std::size_t> rows() {
  std::vector<std::size_t> all;
  for (std::size_t index = 0; index < case_count(); ++index)
    if (!case_families(index, DeviceKind::cuda, Operation::backward).empty()) all.push_back(index);
  return all;
}

TEST_P(GpuBackwardPlans, of_other_machines_meet_the_criterion) {
  BackwardRow c(GetParam(), {});
  SCOPED_TRACE(c.row.name());
  reference::forward(c.forward_in(), c.row.call.out(), c.options());
  DeviceBackward gpu(c.in, c.out, c.options());
  Call call = make_backward(gpu.in, gpu.out, gpu.options);
  const std::int64_t shared_bytes = cuda::device_facts(0).shared_bytes;
  std::set<std::string> plans;
  for (const Numbers& numbers : kMachines) {
    std::optional<Plan> plan = plan_for(call, numbers);
    if (!plan || plan->shared_bytes > shared_bytes) continue;
    plan->vector_sums = plan->vector_sums && cuda::device_facts(0).major >= 9;
    if (!plans.insert(text(plan->text(), plan->vector_sums)).second) continue;
    SCOPED_TRACE(text("compute capability ", numbers.compute_capability, "\n", plan->text()));
    c.poison();
    cuda::run(call, *plan, false);
    gpu.download();
    EXPECT_TRUE(backward_agrees(c.in, c.out, c.options()));
    EXPECT_TRUE(gpu.surroundings_intact());
  }
}

INSTANTIATE_TEST_SUITE_P(table, GpuBackwardPlans, testing::ValuesIn(rows()));

}  // namespace
}  // namespace narrows::test
