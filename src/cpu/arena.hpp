// Scratch of one call: one block, the caller's or the call's own, handed out region by region.
#pragma once

#include "core/error.hpp"
#include "cpu/scratch.hpp"
#include "plan/plan.hpp"

#include <cstdint>
#include <utility>

namespace narrows::cpu {

class Arena {
 public:
  /// lent: plan.lent_workspace_bytes() or more at any address; null: the arena allocates.
  Arena(const Plan& plan, std::byte* lent) {
    const i64 bytes = plan.workspace_bytes();
    if (bytes == 0) return;
    if (!lent) {
      owned_ = allocated(bytes);
      next_ = owned_.get();
    } else {
      const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(lent) % kScratchAlignment;
      next_ = lent + (past ? kScratchAlignment - past : 0);
    }
  }

  /// The plan's regions in their order, 64-byte aligned and uninitialised; null for one of no bytes.
  std::byte* take(const Region& region) {
    if (region.bytes == 0) return nullptr;
    return std::exchange(next_, next_ + region.bytes);
  }

 private:
  static Scratch<std::byte> allocated(i64 bytes) {
    try {
      return make_scratch<std::byte>(static_cast<std::size_t>(bytes));
    } catch (const std::bad_alloc&) {
      throw Error(ErrorCode::out_of_memory, text("workspace: ", bytes, " bytes could not be allocated"));
    }
  }

  Scratch<std::byte> owned_;
  std::byte* next_ = nullptr;
};

}  // namespace narrows::cpu
