// Every option of a forward call once, under the contract's names, for all commands that describe one.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <narrows/narrows.hpp>

#include "tools/command_line.hpp"

namespace narrows::cli {

struct CallOptions {
  CallOptions() = default;
  CallOptions(const CallOptions&) = delete;  // `values` points into the maps
  CallOptions& operator=(const CallOptions&) = delete;

  Options values;
  std::string family;
  std::map<std::string, std::vector<std::int32_t>, std::less<>> integers;  // tensors given as lists, by name
  std::map<std::string, std::vector<float>, std::less<>> reals;

  /// The options as the library takes them; valid as long as this object.
  Options complete();
};

void add_call_options(CLI::App& command, CallOptions& options);

/// A tensor of Options as files name it.
struct TensorName {
  enum Kind : std::uint8_t { floats, indices, booleans };
  std::string_view name;
  Tensor Options::*member;
  Kind kind;
  std::string_view also = {};  // a second name
};
std::span<const TensorName> tensor_names();

}  // namespace narrows::cli
