// The .safetensors format: an 8-byte little-endian header length, a JSON header, the data of all tensors without gaps
// (https://github.com/huggingface/safetensors#format).
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tools/files/tensor_file.hpp"

namespace narrows::files {

/// The header's key that is no tensor.
inline constexpr std::string_view kSafetensorsMetadata = "__metadata__";

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::fp32;
  Dims shape;
  std::uint64_t begin = 0, end = 0;  // bytes, counted from the header's end
};

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;
  std::map<std::string, std::string> metadata;
};

/// Reads the JSON and checks each entry by itself: known dtype, rank, and as many bytes as the shape needs.
SafetensorsHeader parse_safetensors_header(std::string_view file, std::string_view json);

/// "F32"
std::string_view safetensors_dtype(DType dtype);

TensorFile parse_safetensors(const Source& source);

/// Everything before the data of `arrays`, which follow in this order.
std::string safetensors_header(std::string_view file, std::span<const Array> arrays);

}  // namespace narrows::files
