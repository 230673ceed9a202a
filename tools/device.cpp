#include "tools/device.hpp"

#include <chrono>
#include <cstdio>
#include <utility>

#include <fmt/format.h>

#include "api/machine.hpp"
#include "core/environment.hpp"
#include "core/error.hpp"
#include "cuda/driver.hpp"
#include "cuda/machine.hpp"
#include "plan/plan.hpp"
#include "tools/files/failure.hpp"
#include "tools/files/layout.hpp"
#include "tools/text.hpp"

namespace narrows::cli {
namespace {

DeviceChoice parse_device(const std::string& option, const std::string& text) {
  if (text == "auto") return {};
  if (text == "cpu") return {false, {}};
  if (text == "cuda") return {false, {DeviceKind::cuda, 0}};
  if (text.starts_with("cuda:"))
    return {false, {DeviceKind::cuda, static_cast<int>(parse_integer(option, text.substr(5), 0, 1023))}};
  refuse_value(option, files::printable(text), "must be auto, cpu, cuda or cuda:N");
}

template <class Call, class Visit> void for_each_tensor(Call& call, Visit visit) {
  visit(call.in.q);
  visit(call.in.k);
  visit(call.in.v);
  for (const TensorName& tensor : tensor_names()) visit(call.options.*tensor.member);
}

/// Bytes from the first element to behind the last. A file's tensors have no negative strides.
std::int64_t extent(const Tensor& tensor) {
  std::int64_t last = 0;
  const Dims strides = tensor.strides.empty() ? files::row_major_strides(tensor.shape) : tensor.strides;
  for (std::size_t axis = 0; axis < tensor.shape.rank(); ++axis) {
    if (tensor.shape[axis] == 0) return 0;
    last += (tensor.shape[axis] - 1) * strides[axis];
  }
  return (last + 1) * static_cast<std::int64_t>(item_size(tensor.dtype));
}

std::string family_of(const FileCall& call) {
  return call.options.family.empty() ? environment::family() : std::string(call.options.family);
}

void plan_there(const FileCall& call, bool backward, const Device& device) {
  const FileCall there = labelled(call, device);
  const Call checked =
      backward ? make_explained_backward(there.in, there.options) : make_explained(there.in, there.options);
  choose(checked.problem, work(checked), machine_of(device), family_of(call));
}

}  // namespace

void add_device_option(CLI::App& command, DeviceChoice& choice) {
  add_option(
      command, "--device",
      {"NAME", "cpu, cuda, cuda:N, or auto (the default): a GPU if it takes the call, else the CPU", "How to compute"},
      [&choice](const std::string& option, const std::string& text) { choice = parse_device(option, text); });
}

FileCall labelled(FileCall call, const Device& device) {
  for_each_tensor(call, [&](Tensor& tensor) { tensor.device = device; });
  return call;
}

Device device_for(const FileCall& call, bool backward, const DeviceChoice& choice, const std::string& label) {
  if (!choice.automatic) return choice.device;
  if (cuda::presence().devices == 0) return {};
  const Device gpu{DeviceKind::cuda, 0};
  try {
    plan_there(call, backward, gpu);
    return gpu;
  } catch (const Error& error) {
    const bool asked_for_cpu = call.options.threads || !family_of(call).empty();
    if (!asked_for_cpu)
      fmt::print(stderr, "narrows: note: {}on the CPU, not on {}: {}\n", label, to_text(gpu), error.what());
    return {};
  }
}

GpuCall::GpuCall(const FileCall& call, const Outputs& out, const Device& device) : device_(device), call_(call) {
  const cuda::CurrentDevice current(device.index);
  copy_inputs();
  results_ = copies_.size();
  out_ = {copied(out.o), copied(out.lse)};
  prepare(call_.in, call_.options);
}

GpuCall::GpuCall(const FileCall& call, const BackwardInputs& saved, const Gradients& gradients, const Device& device)
    : device_(device), call_(call), backward_(true) {
  const cuda::CurrentDevice current(device.index);
  copy_inputs();
  const Tensor dout = copied(saved.dout), dlse = copied(saved.dlse);
  results_ = copies_.size();
  out_ = {copied(saved.o), copied(saved.lse)};
  gradients_ = {copied(gradients.dq),    copied(gradients.dk),      copied(gradients.dv),
                copied(gradients.dbias), copied(gradients.dslopes), copied(gradients.dsinks)};
  saved_ = {call_.in.q, call_.in.k, call_.in.v, out_.o, out_.lse, dout, dlse};
  narrows::forward(call_.in, out_, call_.options);
  prepare_backward(call_.in, call_.options);
}

void GpuCall::copy_inputs() {
  for_each_tensor(call_, [&](Tensor& tensor) { tensor = copied(tensor); });
}

GpuCall::~GpuCall() {
  const cuda::CurrentDevice current(device_.index);
  copies_.clear();
}

Tensor GpuCall::copied(const Tensor& host) {
  if (!host.given()) return {};
  const std::int64_t bytes = extent(host);
  copies_.push_back({host, std::make_unique<cuda::DeviceMemory>(bytes, nullptr)});
  Tensor there = host;
  there.data = copies_.back().memory->data();
  there.device = device_;
  if (bytes) cuda::copy_to_device(there.data, host.data, bytes, nullptr);
  return there;
}

double GpuCall::seconds() const {
  const cuda::CurrentDevice current(device_.index);
  cuda::synchronise(nullptr);
  const auto begin = std::chrono::steady_clock::now();
  if (backward_)
    backward(saved_, gradients_, call_.options);
  else
    forward(call_.in, out_, call_.options);
  cuda::synchronise(nullptr);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void GpuCall::fetch() const {
  const cuda::CurrentDevice current(device_.index);
  for (std::size_t i = results_; i < copies_.size(); ++i)
    if (const std::int64_t bytes = extent(copies_[i].host))
      cuda::copy_to_host(copies_[i].host.data, copies_[i].memory->data(), bytes, nullptr);
  cuda::synchronise(nullptr);
}

}  // namespace narrows::cli
