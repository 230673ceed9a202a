// Memory that a call's kernels use besides its tensors.
#pragma once

#include "core/buffers.hpp"
#include "cuda/driver.hpp"
#include "plan/plan.hpp"

#include <optional>

namespace narrows::cuda {

/// Of plan.workspace_bytes(), aligned: the caller's, or allocated on the call's stream until the scope ends.
class Scratch {
 public:
  Scratch(const Plan& plan, const Buffers& buffers) {
    if (!buffers.workspace) memory_.emplace(plan.workspace_bytes(), static_cast<Stream>(buffers.stream));
    data_ = memory_ ? static_cast<std::byte*>(memory_->data()) : aligned(buffers.workspace);
  }
  std::byte* data() const { return data_; }

 private:
  static std::byte* aligned(std::byte* workspace) {
    const auto address = reinterpret_cast<std::uintptr_t>(workspace);
    return workspace + (kScratchAlignment - address % kScratchAlignment) % kScratchAlignment;
  }

  std::optional<DeviceMemory> memory_;
  std::byte* data_ = nullptr;
};

}  // namespace narrows::cuda
