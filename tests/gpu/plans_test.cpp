// Plans for other GPUs, on this one: rows of the tables that no machine at hand would choose are executed all the same.
#include "cuda/run.hpp"
#include "tests/gpu/device_call.hpp"
#include "tests/gpu/machines.hpp"
#include "tests/gpu/turned_first.hpp"
#include "tests/support/cases.hpp"
#include "tests/support/check.hpp"

#include <set>

namespace narrows::test {
namespace {

class GpuPlans : public OnGpu<testing::TestWithParam<std::size_t>> {};

std::vector<std::size_t> rows() {
  std::vector<std::size_t> all;
  for (std::size_t index = 0; index < case_count(); ++index)
    if (!case_families(index, DeviceKind::cuda).empty()) all.push_back(index);
  return all;
}

TEST_P(GpuPlans, of_other_machines_meet_the_criterion) {
  Case row = make_case(GetParam());
  SCOPED_TRACE(row.name());
  const Inputs in = inputs(row);
  DeviceCall gpu(in, row.call.out(), row.call.options);
  const Call call = make_forward(gpu.in, gpu.out, gpu.options);
  const std::int64_t shared_bytes = cuda::device_facts(0).shared_bytes;
  std::set<std::string> plans;
  for (const Numbers& numbers : kMachines) {
    const std::optional<Plan> plan = plan_for(call, numbers);
    if (!plan || plan->shared_bytes > shared_bytes || !plans.insert(plan->text()).second) continue;
    SCOPED_TRACE(text("compute capability ", numbers.compute_capability, "\n", plan->text()));
    row.call.o.poison();
    row.call.lse.poison();
    cuda::run(call, *plan, false);
    gpu.download();
    EXPECT_TRUE(turned_agrees(in, row.call.out(), row.call.options));
    EXPECT_TRUE(gpu.surroundings_intact());
  }
}

INSTANTIATE_TEST_SUITE_P(table, GpuPlans, testing::ValuesIn(rows()));

}  // namespace
}  // namespace narrows::test
