#pragma once

#include <cstdint>
#include <cstdlib>

#include "tools/files/layout.hpp"
#include "tools/files/tensor_file.hpp"

namespace narrows::files {

/// What a reader promises of every file that it accepts; aborts where it does not hold. Reads every byte.
inline void check_file(const TensorFile& file) {
  unsigned sum = 0;
  for (const Array& array : file.arrays) {
    const std::int64_t size = dense_bytes("accepted", array.shape, array.dtype);
    const auto address = reinterpret_cast<std::uintptr_t>(array.bytes.data());
    if (array.bytes.size() != static_cast<std::uint64_t>(size)) std::abort();
    if (address % item_size(array.dtype) != 0) std::abort();
    if (file.find(array.name) != &array) std::abort();
    const Array dense = packed("accepted", array);
    if (dense.bytes.size() != array.bytes.size()) std::abort();
    for (const std::byte byte : dense.bytes) sum += std::to_integer<unsigned>(byte);
  }
  volatile unsigned sink = sum;
  static_cast<void>(sink);
}

}  // namespace narrows::files
