// What the host pays for a call: not judged here, but left in the report for `run bench`, which puts it into the record.
#include "core/work.hpp"
#include "cuda/forward.hpp"
#include "cuda/machine.hpp"
#include "plan/plan.hpp"
#include "tests/gpu/device_call.hpp"

#include <algorithm>
#include <chrono>
#include <vector>

namespace narrows::test {
namespace {

using Clock = std::chrono::steady_clock;

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

/// RecordProperty takes whole numbers.
void record_nanoseconds(const char* name, double microseconds) {
  testing::Test::RecordProperty(name, static_cast<int>(1000 * microseconds));
}

Attention small_call() {
  Attention a({1, 128, 128, 8, 8, 64, 64}, DType::bf16);
  a.options.causal = Causal::bottom_right;
  a.options.family = "sm80";
  return a;
}

using GpuBench = GpuTest;

/// The first of a process: its context is there, its tensors are, its kernel is not.
TEST_F(GpuBench, first_call) {
  Attention a = small_call();
  const DeviceCall gpu(a.in(), a.out(), a.options);
  Options options = gpu.options;
  options.status = {};
  const Clock::time_point start = Clock::now();
  forward(gpu.in, gpu.out, options);
  const double called = microseconds_since(start);
  wait_for_device();
  record_nanoseconds("first_call_ns", called);
  record_nanoseconds("first_result_ns", microseconds_since(start));
  EXPECT_GT(called, 0);
}

/// Of groups of a few calls, with the GPU idle before each, so that none waits for room among what was enqueued.
template <class Run> double median_cost(const Run& run) {
  constexpr int kCalls = 50;
  std::vector<double> spent;
  for (int group = 0; group < 41; ++group) {
    wait_for_device();
    const Clock::time_point start = Clock::now();
    for (int call = 0; call < kCalls; ++call) run();
    spent.push_back(microseconds_since(start) / kCalls);
  }
  std::nth_element(spent.begin(), spent.begin() + 20, spent.end());
  return spent[20];
}

/// A whole call, and of it the part behind the plan: arguments, kernel, the driver's launch.
TEST_F(GpuBench, host_cost) {
  Attention a = small_call();
  const DeviceCall gpu(a.in(), a.out(), a.options);
  Options options = gpu.options;
  options.status = {};
  const double whole = median_cost([&] { forward(gpu.in, gpu.out, options); });
  const Call call = make_forward(gpu.in, gpu.out, options);
  const Plan plan = choose(call.problem, work(call), cuda::machine(call.problem.device)).plan;
  const double launch = median_cost([&] { cuda::run_forward(call.problem, plan, call.buffers); });
  record_nanoseconds("host_call_ns", whole);
  record_nanoseconds("host_launch_ns", launch);
  EXPECT_GT(whole, 0);
}

}  // namespace
}  // namespace narrows::test
