// Which rows are measured: the table of benchmarks, and how filters change it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tools/bench_row.hpp"

namespace narrows::cli {

/// The axes of the table; a filter replaces one. Where they are empty an operation and a case have their own values.
struct Selection {
  std::vector<Op> op;
  std::vector<DType> dtype;
  std::vector<std::int64_t> d, sq;
  std::vector<bool> causal;
  std::vector<Case> special;
  std::vector<std::int64_t> threads;
  std::optional<std::int64_t> b, h, hk, sk, dv;
  bool quick = false;  // few rows, for a look
};

/// threads: cores of this process. last_cache: bytes of the last level of cache, which places the keys of decode rows; 0 =
/// not known. Throws Error where a filter leaves no row.
std::vector<Row> rows_of(const Selection& selection, int threads, std::int64_t last_cache);

/// Lengths of sequences that have `total` rows together, as requests have them: the longest a quarter of all, the n-th
/// longest 1/n of that, in an order without meaning.
std::vector<std::int32_t> zipf_lengths(std::int64_t total);

}  // namespace narrows::cli
