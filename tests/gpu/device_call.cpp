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

constexpr std::array kOptionTensors{&Options::alibi_slopes, &Options::bias,
                                    &Options::sinks,        &Options::shift,
                                    &Options::mask,         &Options::cu_seqlens_q,
                                    &Options::cu_seqlens_k, &Options::seqused_q,
                                    &Options::seqused_k,    &Options::key_begin,
                                    &Options::key_end,      &Options::cache_seqlens,
                                    &Options::block_table,  &Options::cache_batch_idx,
                                    &Options::leftpad,      &Options::k_new,
                                    &Options::v_new,        &Options::cu_seqlens_k_new,
                                    &Options::rotary_cos,   &Options::rotary_sin,
                                    &Options::rotary_base};

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

DeviceTensors::DeviceTensors(const Options& host, Placement placement)
    : options(host), placement_(placement), status_(sizeof(CallStatus)) {
  for (Tensor Options::*tensor : kOptionTensors) options.*tensor = input(host.*tensor);
  options.seed.tensor = input(host.seed.tensor);
  options.offset.tensor = input(host.offset.tensor);
  options.status = {status_.data(), DType::int32, {4}, {}, {DeviceKind::cuda, current_device()}};
}

Tensor DeviceTensors::input(const Tensor& host) {
  return host.given() ? inputs_.emplace_back(host, placement_).tensor() : Tensor{};
}

Tensor DeviceTensors::changed(const Tensor& host) { return changed_.emplace_back(host, placement_).tensor(); }

Tensor DeviceTensors::result(const Tensor& host) {
  return host.given() ? results_.emplace_back(host, placement_).tensor() : Tensor{};
}

void DeviceTensors::poison(std::int64_t workspace_bytes) {
  for (Mirror& result : results_) result.poison(options.stream);
  status_.fill(0xFF, options.stream);
  if (workspace_bytes > 0 && (!workspace_ || workspace_->bytes() < workspace_bytes))
    workspace_.emplace(workspace_bytes);
  options.workspace = {};
  if (workspace_bytes == 0) return;
  workspace_->fill(0xFF, options.stream);
  options.workspace = {workspace_->data(), DType::uint8, {workspace_->bytes()}, {}, options.status.device};
}

DeviceCall::DeviceCall(const Inputs& host_in, const Outputs& host_out, const Options& host_options, Placement placement)
    : DeviceTensors(host_options, placement),
      in{input(host_in.q), cache(host_in.k), cache(host_in.v)},
      out{result(host_out.o), result(host_out.lse)} {
  wait_for_device();  // the call's stream may not wait for what was copied
}

Tensor DeviceCall::cache(const Tensor& host) { return options.k_new.given() ? changed(host) : input(host); }

void DeviceCall::run() {
  poison(workspace_size(in, options));
  forward(in, out, options);
}

DeviceBackward::DeviceBackward(const BackwardInputs& host_in, const Gradients& host_out, const Options& host_options,
                               Placement placement)
    : DeviceTensors(host_options, placement),
      in{input(host_in.q),   input(host_in.k),    input(host_in.v),   input(host_in.o),
         input(host_in.lse), input(host_in.dout), input(host_in.dlse)},
      out{result(host_out.dq),    result(host_out.dk),      result(host_out.dv),
          result(host_out.dbias), result(host_out.dslopes), result(host_out.dsinks)} {
  wait_for_device();
}

void DeviceBackward::run() {
  poison(backward_workspace_size({in.q, in.k, in.v}, options));
  backward(in, out, options);
}

void DeviceTensors::download() {
  cuda::synchronise(static_cast<cuda::Stream>(options.stream));
  for (const Mirror& result : results_) result.download();
  for (const Mirror& cache : changed_) cache.download();
}

CallStatus DeviceTensors::status() const {
  CallStatus found;
  status_.download(&found, sizeof found);
  return found;
}

testing::AssertionResult DeviceTensors::surroundings_intact() const {
  for (std::size_t x = 0; x < inputs_.size(); ++x)
    if (!inputs_[x].untouched()) return testing::AssertionFailure() << "input " << x << " was written to";
  for (std::size_t x = 0; x < changed_.size(); ++x)
    if (!changed_[x].margins_intact()) return testing::AssertionFailure() << "memory beside cache " << x << " was";
  for (std::size_t x = 0; x < results_.size(); ++x)
    if (!results_[x].margins_intact()) return testing::AssertionFailure() << "memory beside result " << x << " was";
  if (!status_.margins_intact()) return testing::AssertionFailure() << "memory beside status was written to";
  if (workspace_ && !workspace_->margins_intact())
    return testing::AssertionFailure() << "memory beside the workspace was written to";
  return testing::AssertionSuccess();
}

void DeviceTensors::upload(const Tensor& device) {
  for (std::deque<Mirror>* mirrors : {&inputs_, &changed_})
    for (Mirror& mirror : *mirrors)
      if (mirror.tensor().data == device.data) mirror.upload();
  wait_for_device();
}

}  // namespace narrows::test
