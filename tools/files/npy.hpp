// The .npy format, versions 1, 2 and 3: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "tools/files/tensor_file.hpp"

namespace narrows::files {

/// What the dict of the header says.
struct NpyDict {
  DType dtype = DType::fp32;
  bool fortran_order = false;
  Dims shape;
};
NpyDict parse_npy_dict(std::string_view subject, std::string_view text);

/// Magic, version and length field of every version fit in so many bytes.
inline constexpr std::size_t kNpyPrefix = 12;

bool is_npy(std::span<const std::byte> bytes);

/// Bytes before the data, from the first kNpyPrefix bytes of a file or all of a shorter one.
std::size_t npy_header_size(std::string_view subject, std::span<const std::byte> prefix);

/// The array without its bytes; `header` holds npy_header_size bytes, and `data_size` bytes follow it.
Array parse_npy_header(std::string_view subject, std::span<const std::byte> header, std::uint64_t data_size);

TensorFile parse_npy(const Source& source);

/// Everything before the data of a row-major array. Fails for a dtype that NumPy does not have.
std::string npy_header(std::string_view subject, const Array& array);

}  // namespace narrows::files
