// The .npz format: a zip archive of .npy files, stored or deflated.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>

#include "tools/files/tensor_file.hpp"

namespace narrows::files {

bool is_zip(std::span<const std::byte> bytes);

/// Inflates every member; the arrays together take at most `memory_limit` bytes, checked before any is allocated.
TensorFile parse_npz(const Source& source, std::uint64_t memory_limit);

/// Writes packed arrays to `path`, which exists; `file` is its name in messages.
void write_npz(const std::filesystem::path& path, std::string_view file, std::span<const Array> arrays);

}  // namespace narrows::files
