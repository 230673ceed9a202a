#include "tools/files/npy.hpp"

#include <algorithm>
#include <array>
#include <filesystem>

#include <fmt/format.h>

#include "tools/files/failure.hpp"
#include "tools/files/layout.hpp"

namespace narrows::files {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::size_t kVersionEnd = 8;

// Six times the header that NumPy itself accepts unasked; a header of five sizes has less than 250 bytes.
constexpr std::uint64_t kNpyHeaderLimit = 65536;

std::uint64_t little_endian(std::span<const std::byte> bytes) {
  std::uint64_t value = 0;
  for (std::size_t i = bytes.size(); i-- > 0;) value = value << 8U | std::to_integer<std::uint64_t>(bytes[i]);
  return value;
}

std::size_t length_field(std::span<const std::byte> prefix) { return prefix[6] == std::byte{1} ? 2 : 4; }

std::string_view descr_of(std::string_view subject, DType dtype) {
  switch (dtype) {
    case DType::fp16: return "<f2";
    case DType::fp32: return "<f4";
    case DType::fp64: return "<f8";
    case DType::int32: return "<i4";
    case DType::int64: return "<i8";
    case DType::uint8: return "|u1";
    case DType::boolean: return "|b1";
    case DType::bf16: break;
  }
  fail(subject, "NumPy has no bfloat16; write bf16 to .safetensors or convert to fp32");
}

}  // namespace

bool is_npy(std::span<const std::byte> bytes) {
  return bytes.size() >= kMagic.size() &&
         std::equal(kMagic.begin(), kMagic.end(), bytes.begin(), [](char c, std::byte b) { return std::byte(c) == b; });
}

std::size_t npy_header_size(std::string_view subject, std::span<const std::byte> prefix) {
  if (!is_npy(prefix)) fail(subject, "not .npy data: it does not begin with \\x93NUMPY");
  if (prefix.size() < kVersionEnd) fail(subject, fmt::format("ends after {} bytes, within the version", prefix.size()));
  const int major = std::to_integer<int>(prefix[6]);
  const int minor = std::to_integer<int>(prefix[7]);
  if (major < 1 || major > 3 || minor != 0)
    fail(subject, fmt::format(".npy version {}.{} is not read; 1.0, 2.0 and 3.0 are", major, minor));
  const std::size_t begin = kVersionEnd + length_field(prefix);
  if (prefix.size() < begin)
    fail(subject, fmt::format("ends after {} bytes, within the header's length", prefix.size()));
  const std::uint64_t length = little_endian(prefix.subspan(kVersionEnd, length_field(prefix)));
  if (length > kNpyHeaderLimit)
    fail(subject, fmt::format("header of {} bytes; at most {} are read", length, kNpyHeaderLimit));
  return begin + static_cast<std::size_t>(length);
}

Array parse_npy_header(std::string_view subject, std::span<const std::byte> header, std::uint64_t data_size) {
  const std::span<const std::byte> text = header.subspan(kVersionEnd + length_field(header));
  const NpyDict dict = parse_npy_dict(subject, {reinterpret_cast<const char*>(text.data()), text.size()});
  const std::int64_t needed = dense_bytes(subject, dict.shape, dict.dtype);
  if (static_cast<std::uint64_t>(needed) != data_size)
    fail(subject, fmt::format("{} bytes follow the header; shape {} of {} needs {}", data_size, text_of(dict.shape),
                              descr_of(subject, dict.dtype), needed));
  Array array;
  array.dtype = dict.dtype;
  array.shape = dict.shape;
  array.strides = dict.fortran_order ? column_major_strides(dict.shape) : row_major_strides(dict.shape);
  return array;
}

TensorFile parse_npy(const Source& source) {
  const std::span<const std::byte> bytes = source.bytes;
  const std::size_t header = npy_header_size(source.name, bytes.first(std::min(bytes.size(), kNpyPrefix)));
  if (header > bytes.size())
    fail(source.name, fmt::format("the file has {} bytes; its header alone has {}", bytes.size(), header));
  Array array = parse_npy_header(source.name, bytes.first(header), bytes.size() - header);
  array.name = std::filesystem::path(source.name).stem().string();
  array.bytes = bytes.subspan(header);
  array.owner = source.owner;
  return {source.name, {checked_array(source.name, std::move(array))}, {}};
}

std::string npy_header(std::string_view subject, const Array& array) {
  constexpr std::size_t kAlignment = 64;
  std::string shape;
  for (const std::int64_t size : array.shape) shape += fmt::format("{}, ", size);
  if (array.shape.rank() > 1) shape.resize(shape.size() - 2);
  if (array.shape.rank() == 1) shape.pop_back();
  std::string dict =
      fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}), }}", descr_of(subject, array.dtype), shape);
  const std::size_t begin = kVersionEnd + 2;
  dict.append(kAlignment - (begin + dict.size()) % kAlignment, ' ');
  dict.back() = '\n';
  const auto length = static_cast<unsigned>(dict.size());
  return std::string(kMagic) + '\1' + '\0' + static_cast<char>(length & 0xFFU) + static_cast<char>(length >> 8U) + dict;
}

}  // namespace narrows::files
