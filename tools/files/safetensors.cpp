#include "tools/files/safetensors.hpp"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tools/files/failure.hpp"
#include "tools/files/layout.hpp"

namespace narrows::files {
namespace {

constexpr std::size_t kLengthField = 8;
constexpr std::uint64_t kSafetensorsHeaderLimit = 100'000'000;  // the format's own limit

std::string_view header_text(const Source& source) {
  const std::span<const std::byte> bytes = source.bytes;
  if (bytes.size() < kLengthField)
    fail(source.name, fmt::format("the file has {} bytes; the header's length alone has 8", bytes.size()));
  std::uint64_t length = 0;
  for (std::size_t i = kLengthField; i-- > 0;) length = length << 8U | std::to_integer<std::uint64_t>(bytes[i]);
  if (length > kSafetensorsHeaderLimit)
    fail(source.name, fmt::format("header of {} bytes; at most {} are read", length, kSafetensorsHeaderLimit));
  if (length > bytes.size() - kLengthField)
    fail(source.name, fmt::format("header of {} bytes; {} follow its length", length, bytes.size() - kLengthField));
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()) + kLengthField,
                              static_cast<std::size_t>(length));
  if (!text.starts_with('{')) fail(source.name, "not .safetensors data: the header does not begin with '{'");
  return text;
}

/// Refuses overlaps, gaps and tensors beyond the data: every byte belongs to exactly one tensor.
void require_partition(std::string_view file, std::vector<const SafetensorsEntry*> entries, std::uint64_t data_size) {
  std::sort(entries.begin(), entries.end(), [](const SafetensorsEntry* a, const SafetensorsEntry* b) {
    return a->begin != b->begin ? a->begin < b->begin : a->end < b->end;
  });
  std::uint64_t covered = 0;
  const SafetensorsEntry* previous = nullptr;
  for (const SafetensorsEntry* entry : entries) {
    const std::string subject = subject_of(file, "tensor", entry->name);
    const std::string offsets = fmt::format("data_offsets [{}, {}]", entry->begin, entry->end);
    if (entry->end > data_size) fail(subject, fmt::format("{} end beyond the {} bytes of data", offsets, data_size));
    if (entry->begin < covered)
      fail(subject, fmt::format("{} overlap those of tensor {}, [{}, {}]", offsets, printable(previous->name),
                                previous->begin, previous->end));
    if (entry->begin > covered)
      fail(subject, fmt::format("{} leave a gap: bytes [{}, {}] belong to no tensor", offsets, covered, entry->begin));
    covered = entry->end;
    previous = entry;
  }
  if (covered != data_size) fail(file, fmt::format("data bytes [{}, {}] belong to no tensor", covered, data_size));
}

}  // namespace

TensorFile parse_safetensors(const Source& source) {
  const std::string_view text = header_text(source);
  const std::span<const std::byte> data = source.bytes.subspan(kLengthField + text.size());
  SafetensorsHeader header = parse_safetensors_header(source.name, text);
  std::vector<const SafetensorsEntry*> entries;
  entries.reserve(header.entries.size());
  for (const SafetensorsEntry& entry : header.entries) entries.push_back(&entry);
  require_partition(source.name, std::move(entries), data.size());

  TensorFile file{source.name, {}, std::move(header.metadata)};
  file.arrays.reserve(header.entries.size());
  for (const SafetensorsEntry& entry : header.entries) {
    const std::span<const std::byte> bytes =
        data.subspan(static_cast<std::size_t>(entry.begin), static_cast<std::size_t>(entry.end - entry.begin));
    file.arrays.push_back(
        checked_array(subject_of(source.name, "tensor", entry.name),
                      {entry.name, entry.dtype, entry.shape, row_major_strides(entry.shape), bytes, source.owner}));
  }
  return file;
}

std::string safetensors_header(std::string_view file, std::span<const Array> arrays) {
  nlohmann::ordered_json json = nlohmann::ordered_json::object();
  std::size_t offset = 0;
  for (const Array& array : arrays) {
    if (array.name == kSafetensorsMetadata) fail(subject_of(file, "array", array.name), "the name is the format's own");
    nlohmann::ordered_json& entry = json[array.name];
    entry["dtype"] = safetensors_dtype(array.dtype);
    entry["shape"] = std::vector<std::int64_t>(array.shape.begin(), array.shape.end());
    entry["data_offsets"] = {offset, offset + array.bytes.size()};
    offset += array.bytes.size();
  }
  std::string text;
  try {
    text = json.dump();
  } catch (const nlohmann::json::exception&) {
    fail(file, "cannot be written: an array's name is not UTF-8");
  }
  text.append((kLengthField - text.size() % kLengthField) % kLengthField, ' ');
  std::string length;
  for (std::size_t i = 0; i < kLengthField; ++i) length += static_cast<char>(text.size() >> (8 * i) & 0xFFU);
  return length + text;
}

}  // namespace narrows::files
