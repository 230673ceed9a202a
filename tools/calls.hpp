// From files of tensors to attention calls.
//
// Names are those of the contract, with the prefix of a call and a dot before them where a file holds several: PREFIX.q,
// PREFIX.k, PREFIX.v make a call, a tensor without prefix belongs to every call.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tools/files/tensor_file.hpp"
#include "tools/options.hpp"

namespace narrows::cli {

/// Axes of 4-d and varlen tensors in files: (b, s, h, d) and (total, h, d), or with heads first.
enum class AxisOrder : std::uint8_t { bshd, bhsd };

struct Reading {
  std::vector<std::string> paths;
  std::vector<std::string> ignored;  // names that are not wanted
  AxisOrder order = AxisOrder::bshd;
  std::optional<DType> dtype;  // to round q, k, v, k_new, v_new and dout to
  bool backward = false;       // dout, dlse and the files' own gradients are wanted
  std::optional<std::uint64_t> dout_seed;
};
void add_reading_options(CLI::App& command, Reading& reading);

struct NamedTensor {
  std::string name;
  Tensor tensor;
};

struct FileCall {
  std::string prefix;  // "layer0", or empty
  Inputs in;
  Options options;
  Tensor dout, dlse;             // of a backward call
  std::vector<NamedTensor> own;  // the file's own results, to compare with
};

struct FileCalls {
  std::vector<files::TensorFile> files;
  std::vector<FileCall> calls;
  std::vector<std::string> unused;  // tensors that no call takes
  std::vector<std::shared_ptr<const void>> owners;
};

/// Every path is read as narrows::files does. `options` must outlive the calls.
FileCalls read_calls(const Reading& reading, CallOptions& options);

/// One line on stderr where there are any.
void note_unused(const FileCalls& calls);

/// The same memory with s and h exchanged: from heads first to (b, s, h, d) or back.
Tensor exchanged(const Tensor& tensor);

/// "layer0.o", or "o" without a prefix.
std::string full_name(const std::string& prefix, std::string_view name);

}  // namespace narrows::cli
