// One file of many compiled kernels, found by content key alone: shipped with a program, it needs no compiler.
//   "narrows pack 1\n" and a zero | number of entries | key, offset, bytes of each, keys ascending | digest of all before | entries
#pragma once

#include "cuda/binary.hpp"
#include "cuda/folder.hpp"

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace narrows::cuda {

class Pack {
 public:
  /// Throws Error (invalid_file) in the name of `name` where the index is not as it was written.
  Pack(File file, const std::string& name);

  /// Nothing where the pack lacks the key, or the entry's bytes are not as they were written.
  std::optional<Binary> find(const Digest& key) const;
  std::vector<Digest> keys() const;

 private:
  struct Place {
    Digest key;
    u64 offset = 0, bytes = 0;
  };
  bool read_index();

  File file_;
  std::vector<Place> index_;
};

/// Throws Error (invalid_file) where `path` cannot be opened or is not a pack.
Pack open_pack(const std::string& path);

struct PackEntry {
  Digest key;
  Binary binary;
};
/// Of keys that differ.
std::string pack_bytes(std::span<const PackEntry> entries);

}  // namespace narrows::cuda
