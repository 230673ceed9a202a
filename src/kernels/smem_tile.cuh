// A tile in shared memory as cp.async fills it and ldmatrix reads it: [chunks][rows][128 bytes]. Byte address in a chunk:
//
//     ... 11 10 | 9 8 7 | 6 5 4 | 3 2 1 0
//         row/8 | row%8 |  unit | byte        the stored unit is unit ^ (row % 8): the 8 rows of an 8x8 matrix
//                   `--xor--^                 then lie in 8 different groups of 4 banks.
//
// Rows of an odd multiple of 64 bytes are cut into chunks of 64 bytes: two of these share 128 bytes, and the stored unit is
// unit ^ (row / 2 % 4).
#pragma once
#include "shared/params.h"

namespace narrows {

constexpr int kUnitBytes = 16;

// A tile's shape: rows, a multiple of 8, and bytes of a row, a multiple of 64.
struct SmemTile {
  int rows, row_bytes;

  constexpr int bytes() const { return rows * row_bytes; }
  constexpr int chunk_bytes() const { return row_bytes % 128 == 0 ? 128 : 64; }  // of a row
  constexpr int chunk_units() const { return chunk_bytes() / kUnitBytes; }
  constexpr int swizzle(int row) const { return chunk_units() == 8 ? row % 8 : row / 2 % 4; }
  // Offset of 16-byte unit `unit` of row `row`.
  constexpr u32 offset(int row, int unit) const {
    const int chunk = unit / chunk_units(), within = unit % chunk_units();
    return static_cast<u32>((chunk * rows + row) * chunk_bytes() + (within ^ swizzle(row)) * kUnitBytes);
  }
};

// Where a thread's unit of a row lies, to go on from. The swizzle is an exclusive or of address bits, so a step along the row is
// one too: `unit` is a multiple of a power of two above the first unit.
template <SmemTile tile> struct UnitAddress {
  u32 first;

  constexpr UnitAddress(u32 start, int row, int unit) : first(start + tile.offset(row, unit)) {}
  // `further`: rows below, a multiple of 8.
  constexpr u32 at(int unit, int further) const {
    const int chunk = unit / tile.chunk_units(), within = unit % tile.chunk_units();
    return (first ^ static_cast<u32>(within * kUnitBytes)) +
           static_cast<u32>((chunk * tile.rows + further) * tile.chunk_bytes());
  }
};

}  // namespace narrows
