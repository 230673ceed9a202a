// Compiled kernels on the disk, one file each, shared by the processes of a user. What the folder holds is a bonus: nothing here
// throws, and what cannot be used is compiled again.
#pragma once

#include "cuda/binary.hpp"
#include "cuda/folder.hpp"

#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace narrows::cuda {

class DiskCache {
 public:
  struct Settings {
    std::string folder;  // empty: `reason`
    std::string reason;  // why there is none; empty: asked for, so that nobody is warned
    i64 limit_bytes = i64{256} << 20;
    std::chrono::milliseconds lock_limit{30'000};
  };
  explicit DiskCache(Settings settings) : settings_(std::move(settings)) {}

  std::optional<Binary> load(const Digest& key, CompilerVersion compiler);
  /// What was used longest ago goes where all together would be larger than the limit.
  void store(const Digest& key, const Binary& binary);

  /// Held by one of all processes for a key; without it, where the limit of time has passed or the folder is of no use.
  class Lock {
   public:
    Lock() = default;
    Lock(const PrivateFolder& folder, std::string name, std::chrono::milliseconds limit);
    Lock(Lock&&) = default;
    ~Lock();

   private:
    const PrivateFolder* folder_ = nullptr;
    std::string name_;
    File file_;
  };
  Lock lock(const Digest& key);

  struct Entry {
    Binary binary;
    i64 bytes = 0;
    i64 used = 0;  // nanoseconds since 1970
  };
  std::vector<Entry> entries();  // that are sound, the longest unused first
  i64 clear();                   // removes all but packs; the number of entries that went
  /// Opened when first asked for; closed where it is of no use.
  const PrivateFolder& folder();
  std::string reason();  // why the folder is of no use; empty where it is of use

 private:
  void warn(const std::string& reason);
  void trim();

  Settings settings_;
  std::once_flag opened_;
  PrivateFolder folder_;
  std::string reason_;
  std::atomic<bool> has_warned_ = false, is_writable_ = true;
};

/// Of a file in the folder: whether it is a compiled kernel.
bool is_kernel(std::string_view name);

/// As NARROWS_CACHE and the default folder say.
DiskCache::Settings disk_settings();

}  // namespace narrows::cuda
