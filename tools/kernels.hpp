// Kernels compiled ahead, many at a time.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "cuda/cache.hpp"

namespace narrows::cli {

struct Wanted {
  Program program;
  std::string architecture;
};

/// The planned set of each architecture, or what is plain and of these dtypes of it; none named: of all. Throws Error on an
/// architecture that Narrows does not plan for.
std::vector<Wanted> planned(const std::vector<std::string>& architectures, bool plain = false,
                            const std::vector<DType>& dtypes = {});
/// Every parts-th of them, from number `part`, 1 to parts, on.
std::vector<Wanted> part_of(std::vector<Wanted> whole, std::int64_t part, std::int64_t parts);
/// Of this machine's GPUs, each once. Throws Error (not_implemented) where there is none.
std::vector<std::string> own_architectures();

/// Each as the cache has it or compiles it, on `threads` threads, in the order of `wanted`. Throws the first Error.
std::vector<cuda::PackEntry> fetch(cuda::Cache& cache, std::span<const Wanted> wanted, int threads);

}  // namespace narrows::cli
