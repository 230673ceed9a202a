// Read this first: a call becomes a Problem (facts), a Plan (decisions) and Buffers (addresses), and a backend runs it.
#include "api/explained.hpp"
#include "api/machine.hpp"
#include "core/environment.hpp"
#include "core/error.hpp"
#include "cpu/backward.hpp"
#include "cpu/forward.hpp"
#include "cpu/machine.hpp"
#include "cuda/backward.hpp"
#include "cuda/decode.hpp"
#include "cuda/forward.hpp"
#include "cuda/machine.hpp"
#include "cuda/run.hpp"
#include "plan/plan.hpp"

#include <narrows/narrows.hpp>

#include <algorithm>

namespace narrows {
namespace {

std::string forced_family(const Options& options) {
  return options.family.empty() ? environment::family() : std::string(options.family);
}

/// Every sequence kept every rule: a call that breaks one has thrown by now.
void write_status(const Tensor& status) {
  if (!status.given()) return;
  auto* const values = static_cast<std::int32_t*>(status.data);
  const std::int64_t step = status.strides.empty() ? 1 : status.strides[0];
  for (std::int64_t i = 0; i < 4; ++i) values[i * step] = 0;
}

bool on_gpu(const Call& call) { return call.problem.device.kind == DeviceKind::cuda; }

Plan chosen(const Call& call, const Options& options) {
  return choose(call.problem, work(call), machine_of(call.problem.device), forced_family(options)).plan;
}

Plan planned(const Call& call, const Options& options) {
  Plan plan = chosen(call, options);
  const std::int64_t need = plan.lent_workspace_bytes();
  const std::int64_t given = call.problem.workspace_bytes;
  if (given >= 0 && given < need)
    refuse_value("workspace", text(given, " bytes"), text("this call needs ", need), to_text(need));
  return plan;
}

}  // namespace

void forward(const Inputs& in, const Outputs& out, const Options& options) {
  const Call call = make_forward(in, out, options);
  const Plan plan = planned(call, options);
  if (on_gpu(call)) return cuda::run(call, plan, options.check || environment::check());
  cpu::run_forward(call.problem, plan, call.buffers);
  write_status(options.status);
}

void prepare(const Inputs& in, const Options& options) {
  const Call call = make_explained(in, options);
  const Plan plan = planned(call, options);
  if (!on_gpu(call)) return;
  if (plan.decodes)
    cuda::prepare_decode(call.problem, plan);
  else
    cuda::prepare_forward(call.problem, plan);
}

void prepare_backward(const Inputs& in, const Options& options) {
  const Call call = make_explained_backward(in, options);
  const Plan plan = planned(call, options);
  if (on_gpu(call)) cuda::prepare_backward(call.problem, plan);
}

void backward(const BackwardInputs& in, const Gradients& out, const Options& options) {
  const Call call = make_backward(in, out, options);
  const Plan plan = planned(call, options);
  if (on_gpu(call)) return cuda::run(call, plan, options.check || environment::check());
  cpu::run_backward(call.problem, plan, call.buffers);
  write_status(options.status);
}

std::int64_t workspace_size(const Inputs& in, const Options& options) {
  return chosen(make_explained(in, options), options).lent_workspace_bytes();
}

std::int64_t backward_workspace_size(const Inputs& in, const Options& options) {
  return chosen(make_explained_backward(in, options), options).lent_workspace_bytes();
}

Explanation explain(const Inputs& in, const Options& options) {
  return explained(make_explained(in, options), forced_family(options));
}

Info info() {
  const Machine machine = cpu::machine();
  Info info{.version = std::string(version()),
            .cpu = std::string(machine.name),
            .instruction_set = std::string(machine.instruction_sets.front()),
            .threads = machine.threads,
            .families = {}};
  const cuda::Presence gpus = cuda::presence();
  for (const Family& family : families()) {
    const bool gpu = family.device == DeviceKind::cuda;
    info.families.push_back({std::string(family.name), !gpu || gpus.devices > 0,
                             gpu ? gpus.detail : text(machine.name, ", ", machine.instruction_sets.front())});
  }
  return info;
}

std::string_view version() noexcept { return NARROWS_VERSION; }

}  // namespace narrows
