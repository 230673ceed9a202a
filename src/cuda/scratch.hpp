// A call's scratch on the current device: the caller's workspace, or memory for the call alone, in the order of its stream.
#pragma once

#include "core/buffers.hpp"
#include "cuda/driver.hpp"
#include "plan/plan.hpp"

#include <cstdint>
#include <optional>

namespace narrows::cuda {

class Scratch {
 public:
  Scratch(const Plan& plan, const Buffers& buffers, Stream stream) {
    if (!buffers.workspace) memory_.emplace(plan.workspace_bytes(), stream);
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
