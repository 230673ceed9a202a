#pragma once

#include <unistd.h>

#include <bit>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "tools/files/tensor_file.hpp"

namespace narrows::files {

/// A directory of its own that goes with the test.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "narrows files XXXXXX").string();
    path_ = ::mkdtemp(name.data());
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }

  std::filesystem::path operator/(std::string_view name) const { return path_ / name; }
  std::size_t files() const {
    return static_cast<std::size_t>(
        std::distance(std::filesystem::directory_iterator(path_), std::filesystem::directory_iterator()));
  }

 private:
  std::filesystem::path path_;
};

inline void save(const std::filesystem::path& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string load(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline std::filesystem::path data_file(std::string_view name) {
  return std::filesystem::path(__FILE__).parent_path() / "data" / name;
}

inline Source source_of(std::string name, std::string_view bytes) {
  return {std::move(name), std::as_bytes(std::span(bytes)), nullptr};
}

/// `value` as `size` little-endian bytes.
inline std::string little(std::uint64_t value, std::size_t size) {
  std::string bytes;
  for (std::size_t i = 0; i < size; ++i) bytes += static_cast<char>(value >> (8 * i) & 0xFFU);
  return bytes;
}

/// The text of the Error that `call` throws; empty when it throws none.
template <class Call> std::string error_of(Call&& call, ErrorCode code = ErrorCode::invalid_file) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return {};
}

/// Elements in row-major order, read by strides.
template <class T> std::vector<T> values_of(const Array& array) {
  EXPECT_EQ(sizeof(T), item_size(array.dtype));
  std::int64_t count = 1;
  for (const std::int64_t size : array.shape) count *= size;
  std::vector<T> values(static_cast<std::size_t>(count));
  for (std::int64_t flat = 0; flat < count; ++flat) {
    std::int64_t rest = flat, offset = 0;
    for (std::size_t axis = array.shape.rank(); axis-- > 0; rest /= array.shape[axis])
      offset += rest % array.shape[axis] * array.strides[axis];
    std::memcpy(&values[static_cast<std::size_t>(flat)],
                array.bytes.data() + static_cast<std::size_t>(offset) * sizeof(T), sizeof(T));
  }
  return values;
}

/// An array over `values`, which must outlive it.
template <class T> Array array_of(std::string name, DType dtype, const Dims& shape, const std::vector<T>& values) {
  return {std::move(name), dtype, shape, {}, std::as_bytes(std::span(values)), nullptr};
}

}  // namespace narrows::files
