#include "tests/gpu/device_call.hpp"

#include <array>
#include <cstring>

namespace narrows::test {
namespace {

Dims strides_of(const Tensor& tensor) {
  if (!tensor.strides.empty()) return tensor.strides;
  Dims strides = tensor.shape;
  std::int64_t stride = 1;
  for (std::size_t axis = tensor.shape.rank(); axis-- > 0; stride *= tensor.shape[axis]) strides[axis] = stride;
  return strides;
}

/// Elements from element 0 to the first in memory, and to one past the last.
std::array<std::int64_t, 2> extent(const Tensor& tensor) {
  const Dims strides = strides_of(tensor);
  std::array<std::int64_t, 2> places{0, 1};
  for (std::size_t axis = 0; axis < tensor.shape.rank(); ++axis) {
    if (tensor.shape[axis] == 0) return {0, 0};
    if (tensor.shape[axis] == 1) continue;
    places[strides[axis] < 0 ? 0 : 1] += strides[axis] * (tensor.shape[axis] - 1);
  }
  return places;
}

constexpr std::array kOptionTensors{&Options::alibi_slopes, &Options::bias,      &Options::sinks,
                                    &Options::shift,        &Options::mask,      &Options::cu_seqlens_q,
                                    &Options::cu_seqlens_k, &Options::seqused_q, &Options::seqused_k};

}  // namespace

Mirror::Mirror(const Tensor& host, Placement placement)
    : host_(host),
      device_(host),
      first_(extent(host)[0] * static_cast<std::int64_t>(item_size(host.dtype))),
      bytes_((extent(host)[1] - extent(host)[0]) * static_cast<std::int64_t>(item_size(host.dtype))),
      block_(bytes_, placement == Placement::flush ? static_cast<std::int64_t>(item_size(host.dtype)) : 128) {
  device_.data = block_.data() ? block_.data() - first_ : nullptr;
  device_.device = {DeviceKind::cuda, current_device()};
  upload();
}

void Mirror::upload() {
  if (bytes_) block_.upload(static_cast<const std::byte*>(host_.data) + first_, bytes_);
}

void Mirror::download() const {
  if (bytes_) block_.download(static_cast<std::byte*>(host_.data) + first_, bytes_);
}

bool Mirror::untouched() const {
  std::vector<std::byte> now(static_cast<std::size_t>(bytes_));
  block_.download(now.data(), bytes_);
  return margins_intact() &&
         (bytes_ == 0 || std::memcmp(now.data(), static_cast<const std::byte*>(host_.data) + first_, now.size()) == 0);
}

Tensor DeviceCall::mirrored(const Tensor& host, Placement placement) {
  if (!host.given()) return {};
  return inputs_.emplace_back(host, placement).tensor();
}

DeviceCall::DeviceCall(const Inputs& host_in, const Outputs& host_out, const Options& host_options, Placement placement)
    : options(host_options), status_(sizeof(CallStatus)) {
  in = {mirrored(host_in.q, placement), mirrored(host_in.k, placement), mirrored(host_in.v, placement)};
  for (Tensor Options::*tensor : kOptionTensors) options.*tensor = mirrored(host_options.*tensor, placement);
  options.seed.tensor = mirrored(host_options.seed.tensor, placement);
  options.offset.tensor = mirrored(host_options.offset.tensor, placement);
  out.o = results_.emplace_back(host_out.o, placement).tensor();
  if (host_out.lse.given()) out.lse = results_.emplace_back(host_out.lse, placement).tensor();
  options.status = {status_.data(), DType::int32, {4}, {}, in.q.device};
  wait_for_device();  // the call's stream may not wait for what was copied
}

void DeviceCall::run() {
  for (Mirror& result : results_) result.poison(options.stream);
  status_.fill(0xFF, options.stream);
  const std::int64_t bytes = workspace_size(in, options);
  if (bytes > 0 && (!workspace_ || workspace_->bytes() < bytes)) workspace_.emplace(bytes);
  options.workspace = {};
  if (bytes > 0) {
    workspace_->fill(0xFF, options.stream);
    options.workspace = {workspace_->data(), DType::uint8, {workspace_->bytes()}, {}, in.q.device};
  }
  forward(in, out, options);
}

void DeviceCall::download() {
  cuda::synchronise(static_cast<cuda::Stream>(options.stream));
  for (const Mirror& result : results_) result.download();
}

CallStatus DeviceCall::status() const {
  CallStatus found;
  status_.download(&found, sizeof found);
  return found;
}

testing::AssertionResult DeviceCall::surroundings_intact() const {
  for (std::size_t x = 0; x < inputs_.size(); ++x)
    if (!inputs_[x].untouched()) return testing::AssertionFailure() << "input " << x << " was written to";
  for (std::size_t x = 0; x < results_.size(); ++x)
    if (!results_[x].margins_intact()) return testing::AssertionFailure() << "memory beside result " << x << " was";
  if (!status_.margins_intact()) return testing::AssertionFailure() << "memory beside status was written to";
  if (workspace_ && !workspace_->margins_intact())
    return testing::AssertionFailure() << "memory beside the workspace was written to";
  return testing::AssertionSuccess();
}

void DeviceCall::upload(const Tensor& device) {
  for (Mirror& input : inputs_)
    if (input.tensor().data == device.data) input.upload();
  wait_for_device();
}

}  // namespace narrows::test
