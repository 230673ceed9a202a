#include "cpu/arena.hpp"

#include "core/error.hpp"

#include <array>
#include <atomic>
#include <cstdint>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace narrows::cpu {

struct alignas(kScratchAlignment) ScratchBlock::Header {
  i64 bytes;  // that follow
};

namespace {

using Header = ScratchBlock::Header;

constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::array<std::atomic<Header*>, ScratchBlock::kKeptBlocks> kept{};
std::atomic<i64> kept_bytes{0};

/// Large blocks are whole huge pages, where the system has them.
std::size_t unit_of(std::size_t size) { return size < kHugePage ? std::size_t{kScratchAlignment} : kHugePage; }

Header* allocate(i64 bytes) {
  const std::size_t size = static_cast<std::size_t>(bytes) + sizeof(Header);
  const std::size_t unit = unit_of(size);
  if (bytes > kMaxCount - static_cast<i64>(2 * kHugePage)) return nullptr;
  const std::size_t whole = (size + unit - 1) / unit * unit;
  void* const memory = ::operator new (whole, std::align_val_t{unit}, std::nothrow);
  if (!memory) return nullptr;
#if defined(__linux__)
  if (unit == kHugePage) ::madvise(memory, whole, MADV_HUGEPAGE);  // advice: ordinary pages do as well
#endif
  return new (memory) Header{static_cast<i64>(whole - sizeof(Header))};
}

void release(Header* block) {
  const std::size_t whole = static_cast<std::size_t>(block->bytes) + sizeof(Header);
  ::operator delete (block, std::align_val_t{unit_of(whole)});
}

/// Null where the place is empty.
Header* take_from(std::atomic<Header*>& place) {
  Header* const found = place.exchange(nullptr, std::memory_order_acquire);
  if (found) kept_bytes.fetch_sub(found->bytes, std::memory_order_relaxed);
  return found;
}

bool keep(Header* block) {
  const i64 total = kept_bytes.fetch_add(block->bytes, std::memory_order_relaxed) + block->bytes;
  if (total <= ScratchBlock::kMostKeptBytes)
    for (std::atomic<Header*>& place : kept) {
      Header* empty = nullptr;
      if (place.compare_exchange_strong(empty, block, std::memory_order_release)) return true;
    }
  kept_bytes.fetch_sub(block->bytes, std::memory_order_relaxed);
  return false;
}

}  // namespace

ScratchBlock::ScratchBlock(i64 bytes) {
  if (bytes == 0) return;
  for (std::atomic<Header*>& place : kept) {
    Header* const found = take_from(place);
    if (!found) continue;
    if (found->bytes >= bytes) {
      block_ = found;
      return;
    }
    release(found);  // a call like this one comes again: what it brings takes the place
  }
  block_ = allocate(bytes);
  if (!block_) throw Error(ErrorCode::out_of_memory, text("workspace: ", bytes, " bytes could not be allocated"));
}

ScratchBlock::~ScratchBlock() {
  if (block_ && !keep(block_)) release(block_);
}

std::byte* ScratchBlock::memory() const { return block_ ? reinterpret_cast<std::byte*>(block_ + 1) : nullptr; }

Arena::Arena(const Plan& plan, std::byte* lent) : own_(lent ? 0 : plan.workspace_bytes()) {
  next_ = lent ? lent : own_.memory();
  const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(next_) % kScratchAlignment;
  if (past) next_ += kScratchAlignment - past;
}

}  // namespace narrows::cpu
