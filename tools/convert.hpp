// Arrays of files as tensors of a call.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "tools/files/tensor_file.hpp"
#include "tools/options.hpp"

namespace narrows::cli {

using Owners = std::vector<std::shared_ptr<const void>>;

/// The array as it lies in the file; refuses one without axes, which the library would take for "not given".
Tensor tensor_of(std::string_view subject, const files::Array& array);

/// As `kind` wants it: int64 that fits becomes int32, uint8 of 0 and 1 becomes boolean. Copies are added to `owners`.
Tensor tensor_of(std::string_view subject, const files::Array& array, TensorName::Kind kind, Owners& owners);

/// Rounded to `dtype`, row-major.
Tensor rounded(std::string_view subject, const files::Array& array, DType dtype, Owners& owners);

}  // namespace narrows::cli
