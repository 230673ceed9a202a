// A folder that nobody else can write to, and files in it of which the same is true.
#pragma once

#include "core/types.hpp"

#include <string>
#include <string_view>
#include <vector>

namespace narrows::cuda {

/// An open file, closed at the end.
class File {
 public:
  File() = default;
  explicit File(int descriptor) : descriptor_(descriptor) {}
  File(File&& other) noexcept : descriptor_(other.release()) {}
  File& operator=(File&& other) noexcept;
  ~File();

  explicit operator bool() const { return descriptor_ >= 0; }
  int descriptor() const { return descriptor_; }
  i64 size() const;
  /// All `bytes` from `offset`; false where they are not to be had.
  bool read(i64 offset, char* to, std::size_t bytes) const;

 private:
  int release();

  int descriptor_ = -1;
};

class PrivateFolder {
 public:
  PrivateFolder() = default;
  /// Made (0700) where it is missing. Closed, and `reason` set, where it is not a folder of this user's that nobody else
  /// may write to, or is reached through a symbolic link.
  PrivateFolder(const std::string& path, std::string& reason);

  explicit operator bool() const { return static_cast<bool>(folder_); }
  int descriptor() const { return folder_.descriptor(); }

  /// A regular file of this user's that nobody else may write to, or a closed File.
  File open(const std::string& name) const;
  /// Whole or not at all, and on the disk when this returns: false and `reason` otherwise. `bytes` replace what was there.
  bool write(const std::string& name, std::string_view bytes, std::string& reason) const;
  bool remove(const std::string& name) const;
  /// Now is when the file was last used.
  void touch(const File& file) const;

  struct Entry {
    std::string name;
    i64 bytes = 0;
    i64 used = 0;  // nanoseconds since 1970
  };
  /// Of regular files, the longest unused first.
  std::vector<Entry> entries() const;

 private:
  File folder_;
};

}  // namespace narrows::cuda
