// Files of named arrays: .npy, .npz (NumPy) and .safetensors, read and written without trusting a byte of them.
//
// Every failure throws narrows::Error with code invalid_file (out_of_memory where an array is larger than the memory there
// is); the text names the file, the array, the value and the rule. What is refused by name: big-endian data, rank above
// Dims::kMaxRank, dtypes without a narrows::DType, and '|V2' in NumPy files, which is how some programs save bfloat16 there:
// two bytes without a type could be anything, so bf16 is read from and written to .safetensors alone.
// An array of rank 0 holds one element. A file must not be truncated by others while its arrays are in use: it is mapped.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <narrows/narrows.hpp>

namespace narrows::files {

struct Array {
  std::string name;
  DType dtype = DType::fp32;
  Dims shape;
  Dims strides;                       // in elements; a reader always fills them in, a writer takes empty as row-major
  std::span<const std::byte> bytes;   // a reader aligns it to the item size; a boolean is 0 or 1
  std::shared_ptr<const void> owner;  // keeps bytes alive; null when the maker of the array does
};

struct TensorFile {
  std::string path;
  std::vector<Array> arrays;                    // in the file's order, names unique
  std::map<std::string, std::string> metadata;  // of .safetensors

  /// Null when there is no array of that name.
  const Array* find(std::string_view name) const;
};

/// Bytes of a file under the name that messages give it.
struct Source {
  std::string name;
  std::span<const std::byte> bytes;
  std::shared_ptr<const void> owner;
};

/// The extension names the format and the content must agree. A .npy holds one array, named by the file's stem.
TensorFile read_tensor_file(const std::filesystem::path& path);

/// Replaces `path` in one step, through a new file beside it: after a failure the old file is still there, whole.
/// Arrays are stored row-major; names must be unique and without control characters; a .npy takes exactly one array.
void write_tensor_file(const std::filesystem::path& path, std::span<const Array> arrays);

}  // namespace narrows::files
