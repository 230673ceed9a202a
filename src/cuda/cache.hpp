// Binaries, each compiled once: memory, then packs, then the disk, then the compiler.
#pragma once

#include "cuda/compile.hpp"
#include "cuda/disk.hpp"
#include "cuda/pack.hpp"

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace narrows::cuda {

class Cache {
 public:
  struct Settings {
    DiskCache::Settings disk;
    std::vector<std::string> own_packs;  // packs that are used where they are there
    std::span<const SourceFile> sources = embedded_sources();
    /// Of the compiler that `compile` uses. Both throw Error where there is none.
    std::function<CompilerVersion()> version;
    std::function<Binary(const Program&, std::string_view architecture, std::span<const SourceFile>)> compile;
  };
  explicit Cache(Settings settings);

  /// Equal programs asked for at once are compiled once, in this process and, where the disk is of use, in all; different
  /// ones at the same time. Throws Error.
  std::shared_ptr<const Binary> get(const Program& program, std::string_view architecture);
  /// What it is found by.
  Digest key(const Program& program, std::string_view architecture) const {
    return content_key(program, architecture, settings_.sources);
  }
  /// Asked before those that are there. Throws Error (invalid_file).
  void add_pack(const std::string& path);
  DiskCache& disk() { return disk_; }

 private:
  struct Slot {
    std::mutex making;
    std::shared_ptr<const Binary> binary;
  };
  void find_packs();
  std::optional<Binary> find_in_packs(const Digest& key);
  Binary find_or_compile(const Digest& key, const Program& program, std::string_view architecture);

  Settings settings_;
  DiskCache disk_;
  std::once_flag packs_found_;
  std::mutex mutex_;
  std::map<Digest, std::shared_ptr<Slot>> slots_;
  std::vector<std::shared_ptr<const Pack>> packs_;
};

/// This process's: the folder of NARROWS_CACHE with the packs (*.pack) in it, narrows.pack beside the library.
Cache& cache();
/// The pack at `path` is asked before the others. Throws Error (invalid_file).
void load_pack(const std::string& path);

}  // namespace narrows::cuda
