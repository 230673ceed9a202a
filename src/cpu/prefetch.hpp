// Rows of one head lie a page apart where heads are interleaved, as in (b, s, h, d): no hardware prefetcher sees the next coming.
#pragma once

#include "core/types.hpp"

#include <cstddef>

namespace narrows::cpu {

enum class Access { read, write };

/// A row of `length` elements, `stride` bytes apart, that will be needed soon.
template <Access access> void prefetch_row(const std::byte* row, i64 length, i64 stride) {
  const i64 bytes = length * (stride < 0 ? -stride : stride);
  const std::byte* const start = stride < 0 ? row - bytes : row;
  for (i64 byte = 0; byte < bytes; byte += 64) __builtin_prefetch(start + byte, access == Access::write);
}

/// Rows between asking for one and needing it.
inline constexpr i64 kRowsAhead = 8;

}  // namespace narrows::cpu
