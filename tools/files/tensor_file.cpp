#include "tools/files/tensor_file.hpp"

#include <algorithm>
#include <set>

#include <fmt/format.h>

#include "tools/files/failure.hpp"
#include "tools/files/input_file.hpp"
#include "tools/files/layout.hpp"
#include "tools/files/npy.hpp"
#include "tools/files/npz.hpp"
#include "tools/files/output_file.hpp"
#include "tools/files/safetensors.hpp"

namespace narrows::files {
namespace {

enum class Format { npy, npz, safetensors };

Format format_of(const std::filesystem::path& path) {
  const std::string extension = path.extension().string();
  if (extension == ".npy") return Format::npy;
  if (extension == ".npz") return Format::npz;
  if (extension == ".safetensors") return Format::safetensors;
  fail(path.string(),
       fmt::format("extension {} names no format; .npy, .npz and .safetensors do", printable(extension)));
}

/// The formats' own messages are clearer where the content is nothing known; this one says what a misnamed file is.
void require_named_as(const Source& source, Format format) {
  const bool npy = is_npy(source.bytes), zip = is_zip(source.bytes);
  const bool safetensors = source.bytes.size() > 8 && source.bytes[8] == std::byte{'{'} && !npy && !zip;
  const std::string_view content = npy ? ".npy" : zip ? ".npz" : safetensors ? ".safetensors" : "";
  const std::string_view named = format == Format::npy ? ".npy" : format == Format::npz ? ".npz" : ".safetensors";
  if (!content.empty() && content != named)
    fail(source.name, fmt::format("is named {}; its content looks like {}", named, content));
}

std::vector<Array> checked(const std::string& file, std::span<const Array> arrays) {
  std::vector<Array> result;
  std::set<std::string> names;
  for (const Array& array : arrays) {
    require_name(file, "array", array.name);
    const std::string subject = subject_of(file, "array", array.name);
    if (!names.insert(array.name).second) fail(subject, "the name is given twice");
    result.push_back(packed(subject, array));
  }
  return result;
}

void write_npy(OutputFile& file, const std::string& name, std::span<const Array> arrays) {
  if (arrays.size() != 1)
    fail(name, fmt::format("{} arrays; a .npy file holds exactly 1, .npz any number", arrays.size()));
  file.write(npy_header(subject_of(name, "array", arrays[0].name), arrays[0]));
  file.write(arrays[0].bytes);
}

void write_safetensors(OutputFile& file, const std::string& name, std::vector<Array> arrays) {
  // Large items first: then every tensor begins at a multiple of its item size, and readers need no copy.
  std::stable_sort(arrays.begin(), arrays.end(),
                   [](const Array& a, const Array& b) { return item_size(a.dtype) > item_size(b.dtype); });
  file.write(safetensors_header(name, arrays));
  for (const Array& array : arrays) file.write(array.bytes);
}

}  // namespace

const Array* TensorFile::find(std::string_view name) const {
  const auto found =
      std::find_if(arrays.begin(), arrays.end(), [name](const Array& array) { return array.name == name; });
  return found == arrays.end() ? nullptr : &*found;
}

TensorFile read_tensor_file(const std::filesystem::path& path) {
  const Format format = format_of(path);
  const Source source = map_file(path);
  require_named_as(source, format);
  switch (format) {
    case Format::npy: return parse_npy(source);
    case Format::npz: return parse_npz(source, available_memory());
    case Format::safetensors: break;
  }
  return parse_safetensors(source);
}

void write_tensor_file(const std::filesystem::path& path, std::span<const Array> arrays) {
  const Format format = format_of(path);
  const std::string name = path.string();
  const std::vector<Array> dense = checked(name, arrays);
  OutputFile file(path);
  switch (format) {
    case Format::npy: write_npy(file, name, dense); break;
    case Format::npz: write_npz(file.path(), name, dense); break;
    case Format::safetensors: write_safetensors(file, name, dense); break;
  }
  file.commit();
}

}  // namespace narrows::files
