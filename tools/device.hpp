// Where a command computes: the CPU, or a GPU with copies of a call's tensors.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tools/calls.hpp"

namespace narrows::cuda {
class DeviceMemory;
}

namespace narrows::cli {

/// What --device says.
struct DeviceChoice {
  bool automatic = true;  // the first GPU if a family takes the call there, else the CPU
  Device device;          // otherwise
};
void add_device_option(CLI::App& command, DeviceChoice& choice);

/// The call as if its tensors were on `device`: for what reads no element.
FileCall labelled(FileCall call, const Device& device);

/// Where the call goes. An automatic choice that finds a GPU and leaves it says why on stderr, in the name of `label`, unless
/// threads or a family were asked for.
Device device_for(const FileCall& call, bool backward, const DeviceChoice& choice, const std::string& label);

/// A call on copies of its tensors in a GPU's memory; results stay in host memory. Made, its kernels are loaded.
class GpuCall {
 public:
  GpuCall(const FileCall& call, const Outputs& out, const Device& device);
  /// Its gradients. saved: dout and dlse are read; o and lse are computed and are results too.
  GpuCall(const FileCall& call, const BackwardInputs& saved, const Gradients& gradients, const Device& device);
  ~GpuCall();

  /// Computes once and answers the time it took, copies apart.
  double seconds() const;
  /// Copies the results into host memory.
  void fetch() const;

 private:
  struct Copy {
    Tensor host;
    std::unique_ptr<cuda::DeviceMemory> memory;
  };
  void copy_inputs();
  Tensor copied(const Tensor& host);

  Device device_;
  std::vector<Copy> copies_;
  FileCall call_;
  // On the device:
  Outputs out_;
  BackwardInputs saved_;
  Gradients gradients_;
  bool backward_ = false;
  std::size_t results_ = 0;  // of copies_, the first one
};

}  // namespace narrows::cli
