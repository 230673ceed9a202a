// How wgmma is told of a tile in shared memory. Plain C++, tested on the host.
//
// 64 bits: [0,14) address, [16,30) leading and [32,46) stride byte offset, all in units of 16 bytes; [62,64) = 1: rows of 128
// bytes are swizzled as smem_tile.cuh says. Tiles start at multiples of 1024 bytes, so that the hardware's exclusive or, of
// address bits, is that of row and unit.
#pragma once
#include "kernels/smem_tile.cuh"

namespace narrows {

constexpr u32 kTileAlignment = 1024;

// A tile whose rows are whole chunks of 128 bytes: 64 columns of 16 bits.
constexpr int kChunkBytes = 128, kChunkColumns = 64;
constexpr SmemTile chunked(int rows, int columns) { return {rows, ceil_div(columns, kChunkColumns) * kChunkBytes}; }

constexpr u64 descriptor(u32 address, u32 leading_bytes, u32 stride_bytes) {
  const auto units = [](u32 bytes) { return u64{bytes / kUnitBytes}; };
  return units(address & 0x3ffff) | units(leading_bytes) << 16 | units(stride_bytes) << 32 | u64{1} << 62;
}
// The sum runs along rows of the tile (Q, K): the stride is 8 rows, the leading offset is ignored.
constexpr u64 descriptor_along_rows(u32 address) { return descriptor(address, kUnitBytes, 8 * kChunkBytes); }
// The sum runs down the columns (V): the leading offset goes to the next 64 columns, the stride to the next 8 rows.
constexpr u64 descriptor_down_columns(u32 address, const SmemTile& tile) {
  return descriptor(address, static_cast<u32>(tile.rows * kChunkBytes), 8 * kChunkBytes);
}

// What to add to a descriptor for the i-th 16 terms of the sum.
constexpr u64 step_along_rows(const SmemTile& tile, int i) {
  return static_cast<u64>(i / 4 * tile.rows * (kChunkBytes / kUnitBytes) + i % 4 * 2);
}
constexpr u64 step_down_columns(int i) { return static_cast<u64>(i * 16 * (kChunkBytes / kUnitBytes)); }

}  // namespace narrows
