// Uninitialised memory for tiles.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace narrows::cpu {

inline constexpr std::align_val_t kTileAlignment{64};

struct FreeScratch {
  void operator()(void* memory) const { ::operator delete(memory, kTileAlignment); }
};
template <class T> using Scratch = std::unique_ptr<T[], FreeScratch>;

template <class T> Scratch<T> make_scratch(std::size_t count) {
  return Scratch<T>(static_cast<T*>(::operator new(count * sizeof(T), kTileAlignment)));
}

}  // namespace narrows::cpu
