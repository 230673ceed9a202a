#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "tools/files/tensor_file.hpp"

namespace narrows::files {

/// Number of bytes of a dense array. Fails where the product of the sizes other than 0 and the item size leaves 63 bits,
/// so that every stride of the array is a valid number too.
std::int64_t dense_bytes(std::string_view subject, const Dims& shape, DType dtype);

Dims row_major_strides(const Dims& shape);
Dims column_major_strides(const Dims& shape);

/// Uninitialised memory, aligned to 64 bytes, that its owner frees.
struct Memory {
  std::span<std::byte> bytes;
  std::shared_ptr<void> owner;
};
Memory allocate(std::string_view subject, std::size_t size);

/// Ends the reading of an array: copies bytes that are not aligned to the item size, refuses booleans other than 0 and 1.
Array checked_array(std::string_view subject, Array array);

/// The same elements, row-major without gaps; the array itself if it is so already. Fails where shape, strides and bytes
/// do not belong together.
Array packed(std::string_view subject, const Array& array);

}  // namespace narrows::files
