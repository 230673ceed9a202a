// A call's tensors copied to a GPU, strides, gaps and all.
#pragma once

#include "shared/status.h"
#include "tests/gpu/device.hpp"
#include "tests/support/attention.hpp"

#include <deque>
#include <optional>

namespace narrows::test {

/// Where a tensor lies: at a multiple of 128 bytes, or so that its end meets memory that faults, at a multiple of its item.
enum class Placement { aligned, flush };

/// A host tensor's memory, from its first element to its last, on the current device.
class Mirror {
 public:
  explicit Mirror(const Tensor& host, Placement placement = Placement::aligned);

  Tensor tensor() const { return device_; }
  void upload();
  void download() const;  // into the host tensor
  /// Whether the memory still holds what the host's does, and its margins what they did.
  bool untouched() const;
  bool margins_intact() const { return block_.margins_intact(); }
  void poison(void* stream) { block_.fill(0xFF, stream); }

 private:
  Tensor host_, device_;
  std::int64_t first_ = 0, bytes_ = 0;  // from the host's element 0
  DeviceBlock block_;
};

/// What forward and backward calls share. The host's arrays must live as long.
class DeviceTensors {
 public:
  DeviceTensors(const DeviceTensors&) = delete;
  DeviceTensors& operator=(const DeviceTensors&) = delete;

  Options options;  // the host's, its tensors on the device; status is set

  /// Waits for the call's stream and brings the results, and a cache that was appended to, to the host's tensors.
  void download();
  CallStatus status() const;
  /// Inputs are as they were, and so is what lies beside every tensor.
  testing::AssertionResult surroundings_intact() const;
  /// Of an options' tensor, after the host's has new values.
  void upload(const Tensor& device);

 protected:
  DeviceTensors(const Options& host, Placement placement);
  ~DeviceTensors() = default;
  Tensor input(const Tensor& host);
  Tensor result(const Tensor& host);
  /// What a call reads and writes.
  Tensor changed(const Tensor& host);
  /// Results and status become NaN and 0xFF on the call's stream, and a workspace of so many bytes 0xFF.
  void poison(std::int64_t workspace_bytes);

 private:
  Placement placement_;
  std::deque<Mirror> inputs_, results_, changed_;
  std::optional<DeviceBlock> workspace_;
  DeviceBlock status_;
};

class DeviceCall : public DeviceTensors {
 public:
  DeviceCall(const Inputs& in, const Outputs& out, const Options& options, Placement placement = Placement::aligned);

  Inputs in;
  Outputs out;

  /// narrows::forward on options.stream, everything that it writes poisoned first on the same stream, but not a cache.
  void run();

 private:
  /// k or v, which a call that appends writes to.
  Tensor cache(const Tensor& host);
};

class DeviceBackward : public DeviceTensors {
 public:
  DeviceBackward(const BackwardInputs& in, const Gradients& out, const Options& options,
                 Placement placement = Placement::aligned);

  BackwardInputs in;
  Gradients out;

  /// narrows::backward, as DeviceCall::run.
  void run();
};

}  // namespace narrows::test
