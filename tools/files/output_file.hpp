#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

namespace narrows::files {

/// A new file beside `target` that commit() puts in its place; without a commit nothing is left of it.
class OutputFile {
 public:
  explicit OutputFile(const std::filesystem::path& target);
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  ~OutputFile();

  /// For writers that open the new file themselves.
  const std::filesystem::path& path() const { return temporary_; }
  void write(std::span<const std::byte> bytes);
  void write(std::string_view text);
  void commit();

 private:
  std::filesystem::path target_, temporary_;
  int descriptor_ = -1;
};

}  // namespace narrows::files
