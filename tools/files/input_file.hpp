#pragma once

#include <cstdint>
#include <filesystem>

#include "tools/files/tensor_file.hpp"

namespace narrows::files {

/// Maps a regular file for reading; directories, pipes and devices are refused without touching them. The mapping lives
/// as long as the source's owner.
Source map_file(const std::filesystem::path& path);

/// Bytes of memory that can be had without swapping, within the limit of the container if there is one.
std::uint64_t available_memory();

}  // namespace narrows::files
