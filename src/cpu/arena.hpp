// Scratch of one call: one block, the caller's or the library's own, handed out region by region.
#pragma once

#include "plan/plan.hpp"

#include <cstddef>
#include <utility>

namespace narrows::cpu {

/// Memory that calls take and give back. Pages that one call touched are there for the next: touching them anew cost 5% of a
/// call at sequence 1024. Up to kKeptBlocks blocks of kMostKeptBytes in all stay with the process, one for each call that ran
/// at the same time as others.
class ScratchBlock {
 public:
  static constexpr int kKeptBlocks = 4;
  static constexpr i64 kMostKeptBytes = i64{256} << 20;

  /// At least so many bytes; none for 0. Throws Error (out_of_memory).
  explicit ScratchBlock(i64 bytes);
  ScratchBlock(const ScratchBlock&) = delete;
  ScratchBlock& operator=(const ScratchBlock&) = delete;
  ~ScratchBlock();

  std::byte* memory() const;  // null without bytes

  struct Header;

 private:
  Header* block_ = nullptr;
};

class Arena {
 public:
  /// lent: plan.lent_workspace_bytes() or more at any address; null: the arena brings its own.
  Arena(const Plan& plan, std::byte* lent);

  /// The plan's regions in their order, 64-byte aligned and uninitialised; null for one of no bytes.
  std::byte* take(const Region& region) {
    if (region.bytes == 0) return nullptr;
    return std::exchange(next_, next_ + region.bytes);
  }

 private:
  ScratchBlock own_;
  std::byte* next_ = nullptr;
};

}  // namespace narrows::cpu
