// Plans for other GPUs, on this one: rows of the tables that no machine at hand would choose are executed all the same.
#include "cuda/machine.hpp"
#include "cuda/run.hpp"
#include "tests/gpu/device_call.hpp"
#include "tests/support/cases.hpp"
#include "tests/support/check.hpp"

#include <array>
#include <map>

namespace narrows::test {
namespace {

struct Numbers {
  int compute_capability = 0, multiprocessors = 0;
  std::int64_t shared_bytes = 0, l2_bytes = 0;
};
// CUDA's programming guide: shared memory that a block may ask for.
constexpr std::array kMachines{Numbers{80, 108, 166912, 40 << 20},   Numbers{86, 84, 101376, 6 << 20},
                               Numbers{89, 128, 101376, 72 << 20},   Numbers{90, 132, 232448, 50 << 20},
                               Numbers{100, 148, 232448, 126 << 20}, Numbers{120, 170, 101376, 96 << 20}};

Machine machine_of(const Numbers& numbers) {
  Machine machine{.device = {DeviceKind::cuda, 0}, .name = "another", .instruction_sets = {}};
  machine.compute_capability = numbers.compute_capability;
  machine.multiprocessors = numbers.multiprocessors;
  machine.shared_bytes = numbers.shared_bytes;
  machine.l2_bytes = numbers.l2_bytes;
  return machine;
}

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
  for (const std::string& family : case_families(GetParam(), DeviceKind::cuda)) {
    std::map<std::string, int> plans;  // to the machine
    for (const Numbers& numbers : kMachines) {
      const Plan plan = choose(call.problem, work(call), machine_of(numbers), family).plan;
      if (plan.shared_bytes > shared_bytes || !plans.emplace(plan.text(), numbers.compute_capability).second) continue;
      SCOPED_TRACE(text("compute capability ", numbers.compute_capability, "\n", plan.text()));
      row.call.o.poison();
      row.call.lse.poison();
      cuda::run(call, plan, false);
      gpu.download();
      EXPECT_TRUE(forward_agrees(in, row.call.out(), row.call.options));
      EXPECT_TRUE(gpu.surroundings_intact());
    }
  }
}

INSTANTIATE_TEST_SUITE_P(table, GpuPlans, testing::ValuesIn(rows()));

}  // namespace
}  // namespace narrows::test
