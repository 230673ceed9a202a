// The text of kernels, in the library itself.
#pragma once

#include "plan/program.hpp"

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace narrows::cuda {

struct SourceFile {
  std::string_view name;  // as it is included: "kernels/softmax.cuh", "shared/mask.h"
  std::string_view text;
};

/// All of src/kernels and src/shared.
std::span<const SourceFile> embedded_sources();

/// What a program is made of: its source first, then each file of `sources` that is reached from it, config.cuh among them.
/// Throws Error where the source is not there.
std::vector<SourceFile> included_sources(const Program& program, std::span<const SourceFile> sources);

}  // namespace narrows::cuda
