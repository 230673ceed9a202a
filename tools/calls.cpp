#include "tools/calls.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include <fmt/format.h>

#include "core/error.hpp"
#include "tools/convert.hpp"
#include "tools/files/failure.hpp"
#include "tools/files/layout.hpp"
#include "tools/text.hpp"

namespace narrows::cli {
namespace {

struct Entry {
  const files::TensorFile* file;
  const files::Array* array;
  bool used = false;
};

/// All tensors of all files, in their order.
class Tensors {
 public:
  explicit Tensors(const std::vector<files::TensorFile>& files) {
    for (const files::TensorFile& file : files)
      for (const files::Array& array : file.arrays) add(file, array);
  }

  void ignore(const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      const auto found = index_.find(name);
      if (found == index_.end())
        refuse_value("--ignore", files::printable(name), "no file holds a tensor of this name");
      entries_.erase(std::find_if(entries_.begin(), entries_.end(),
                                  [&](const auto& entry) { return entry->array->name == name; }));
      index_.erase(found);
    }
  }

  /// The call's own tensor, or else the one of every call; null when there is none.
  Entry* find(const std::string& prefix, std::string_view name) {
    for (const std::string& full : {full_name(prefix, name), std::string(name)})
      if (const auto found = index_.find(full); found != index_.end()) {
        found->second->used = true;
        return found->second;
      }
    return nullptr;
  }

  /// Of names PREFIX.q, PREFIX.k and PREFIX.v; one empty prefix where there is none.
  std::vector<std::string> prefixes() const {
    std::vector<std::string> found;
    for (const auto& entry : entries_) {
      const std::string_view name = entry->array->name;
      if (name.size() < 3 || !(name.ends_with(".q") || name.ends_with(".k") || name.ends_with(".v"))) continue;
      std::string prefix(name.substr(0, name.size() - 2));
      if (std::find(found.begin(), found.end(), prefix) == found.end()) found.push_back(std::move(prefix));
    }
    return found.empty() ? std::vector<std::string>{""} : found;
  }

  std::vector<std::string> unused() const {
    std::vector<std::string> names;
    for (const auto& entry : entries_)
      if (!entry->used) names.push_back(entry->array->name);
    return names;
  }

  std::string contents() const {
    constexpr std::size_t kShown = 16;
    std::vector<std::string> parts;
    for (const auto& entry : entries_) {
      if (parts.size() == kShown) {
        parts.push_back(fmt::format("and {} more", entries_.size() - kShown));
        break;
      }
      const files::Array& array = *entry->array;
      parts.push_back(fmt::format("{} {} {}", files::printable(array.name), name(array.dtype), to_text(array.shape)));
    }
    return parts.empty() ? "nothing" : joined(parts);
  }

 private:
  void add(const files::TensorFile& file, const files::Array& array) {
    const auto entry = std::make_shared<Entry>(Entry{&file, &array});
    const auto [found, fresh] = index_.emplace(array.name, entry.get());
    if (!fresh)
      files::fail(file.path,
                  fmt::format("tensor {} is also in {}", files::printable(array.name), found->second->file->path));
    entries_.push_back(entry);
  }

  std::vector<std::shared_ptr<Entry>> entries_;
  std::map<std::string, Entry*, std::less<>> index_;
};

/// Fills one call after another from the tensors at hand.
class Builder {
 public:
  Builder(const Reading& reading, CallOptions& options, Tensors& tensors, Owners& owners)
      : reading_(reading), options_(options), tensors_(tensors), owners_(owners) {}

  FileCall call(const std::string& prefix) {
    FileCall call;
    call.prefix = prefix;
    call.options = options_.complete();
    call.in = {required(prefix, "q"), required(prefix, "k"), required(prefix, "v")};
    for (const TensorName& tensor : tensor_names()) optional(call, tensor);
    for (const char* name : {"o", "dq", "dk", "dv"}) own(call, name, true);
    for (const char* name : {"lse", "dbias", "dslopes", "dsinks"}) own(call, name, false);
    if (!reading_.backward) return call;
    if (const Entry* entry = tensors_.find(prefix, "dout")) call.dout = rows(*entry);
    if (const Entry* entry = tensors_.find(prefix, "dlse")) call.dlse = tensor_of(subject(*entry), *entry->array);
    return call;
  }

 private:
  static std::string subject(const Entry& entry) {
    return files::subject_of(entry.file->path, "tensor", entry.array->name);
  }

  Tensor ordered(const Tensor& tensor) const { return reading_.order == AxisOrder::bhsd ? exchanged(tensor) : tensor; }

  Tensor required(const std::string& prefix, std::string_view name) {
    const Entry* const entry = tensors_.find(prefix, name);
    if (!entry)
      files::fail(joined(reading_.paths), fmt::format("no tensor {}; a call needs q, k and v, and here are {}",
                                                      files::printable(full_name(prefix, name)), tensors_.contents()));
    return rows(*entry);
  }

  /// Rows of heads, as the call computes with them.
  Tensor rows(const Entry& entry) {
    return ordered(reading_.dtype ? rounded(subject(entry), *entry.array, *reading_.dtype, owners_)
                                  : tensor_of(subject(entry), *entry.array));
  }

  void own(FileCall& call, const char* name, bool of_heads) {
    if (name[0] == 'd' && !reading_.backward) return;
    const Entry* const entry = tensors_.find(call.prefix, name);
    if (!entry) return;
    const Tensor tensor = tensor_of(subject(*entry), *entry->array);
    call.own.push_back({name, of_heads ? ordered(tensor) : tensor});
  }

  void optional(FileCall& call, const TensorName& tensor) {
    const Entry* entry = tensors_.find(call.prefix, tensor.name);
    const Entry* const other = tensor.also.empty() ? nullptr : tensors_.find(call.prefix, tensor.also);
    if (entry && other)
      files::fail(subject(*entry), fmt::format("{} is also given and means the same", files::printable(tensor.also)));
    if (!entry) entry = other;
    if (!entry) return;
    if ((call.options.*tensor.member).given())
      refuse_value(tensor.name, "given twice", fmt::format("by an option and by {}", subject(*entry)));
    const bool new_rows = tensor.name == "k_new" || tensor.name == "v_new";
    call.options.*tensor.member =
        new_rows ? rows(*entry) : tensor_of(subject(*entry), *entry->array, tensor.kind, owners_);
  }

  const Reading& reading_;
  CallOptions& options_;
  Tensors& tensors_;
  Owners& owners_;
};

}  // namespace

std::string full_name(const std::string& prefix, std::string_view name) {
  return prefix.empty() ? std::string(name) : fmt::format("{}.{}", prefix, name);
}

Tensor exchanged(const Tensor& tensor) {
  const std::size_t rank = tensor.shape.rank();
  if (rank != 3 && rank != 4) return tensor;
  Tensor result = tensor;
  if (result.strides.empty()) result.strides = files::row_major_strides(result.shape);
  std::swap(result.shape[rank - 3], result.shape[rank - 2]);
  std::swap(result.strides[rank - 3], result.strides[rank - 2]);
  return result;
}

void add_reading_options(CLI::App& command, Reading& reading) {
  add_repeatable_option(command, "--ignore", {"NAMES", "Leave these tensors of the files out", "Files"},
                        [&reading](const std::string&, const std::string& list) {
                          for (const std::string_view name : split(list)) reading.ignored.emplace_back(name);
                        });
  add_option(command, "--layout", {"ORDER", "Axes of q, k, v and o in files: bshd (the default) or bhsd", "Files"},
             [&reading](const std::string& option, const std::string& text) {
               if (text != "bshd" && text != "bhsd")
                 refuse_value(option, files::printable(text), "must be bshd or bhsd (heads before rows, varlen too)");
               reading.order = text == "bhsd" ? AxisOrder::bhsd : AxisOrder::bshd;
             });
}

FileCalls read_calls(const Reading& reading, CallOptions& options) {
  FileCalls result;
  for (const std::string& path : reading.paths) result.files.push_back(files::read_tensor_file(path));
  Tensors tensors(result.files);
  tensors.ignore(reading.ignored);
  Builder builder(reading, options, tensors, result.owners);
  for (const std::string& prefix : tensors.prefixes()) result.calls.push_back(builder.call(prefix));
  result.unused = tensors.unused();
  return result;
}

void note_unused(const FileCalls& calls) {
  if (calls.unused.empty()) return;
  std::vector<std::string> printed;
  for (const std::string& name : calls.unused) printed.push_back(files::printable(name));
  fmt::print(stderr, "narrows: note: no call uses {}; --ignore leaves tensors out\n", joined(printed));
}

}  // namespace narrows::cli
