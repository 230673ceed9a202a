// A program and an architecture become a binary. Needs NVRTC and no GPU.
#pragma once

#include "cuda/binary.hpp"
#include "cuda/sources.hpp"

#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace narrows::cuda {

/// "sm_80"; "sm_90a" for 9.0, whose own instructions its kernels use.
std::string architecture(int major, int minor);

/// What a binary is found by: equal where the program's text with all it includes, its constants, the architecture and the
/// flags are.
Digest content_key(const Program& program, std::string_view architecture,
                   std::span<const SourceFile> sources = embedded_sources());

/// Throws Error (internal) with the compiler's log where the text is wrong.
Binary compile(const Compiler& compiler, const Program& program, std::string_view architecture,
               std::span<const SourceFile> sources = embedded_sources());
/// With the compiler of this machine; Error (not_implemented) where there is none.
Binary compile(const Program& program, std::string_view architecture,
               std::span<const SourceFile> sources = embedded_sources());

}  // namespace narrows::cuda
