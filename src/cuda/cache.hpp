// Binaries, each compiled once: memory, packs, the disk, then the compiler.
#pragma once

#include "cuda/compile.hpp"

#include <functional>
#include <map>
#include <memory>
#include <mutex>

namespace narrows::cuda {

class Cache {
 public:
  using Compile = std::function<Binary(const Program&, std::string_view architecture)>;
  explicit Cache(Compile compile) : compile_(std::move(compile)) {}

  /// Equal programs asked for at once are compiled once, different ones at the same time. Throws Error.
  std::shared_ptr<const Binary> get(const Program& program, std::string_view architecture);

 private:
  struct Slot {
    std::mutex making;
    std::shared_ptr<const Binary> binary;
  };

  Compile compile_;
  std::mutex mutex_;
  std::map<Digest, std::shared_ptr<Slot>> slots_;
};

/// This process's.
Cache& cache();

}  // namespace narrows::cuda
