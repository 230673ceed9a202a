// Rows of a tensor to a tile in shared memory and back, by all threads of the block or by one warp.
#pragma once
#include "kernels/elements.cuh"
#include "kernels/smem_tile.cuh"

namespace narrows {

// Rows of one head. kCopyBytes 0: elements lie anywhere.
struct GlobalRows {
  char* first;                    // element 0 of row 0
  i64 row_stride, column_stride;  // bytes
  i32 columns;
};

inline GlobalRows rows_of(const TensorArg& tensor, i64 batch, i64 row, i64 head, i32 columns) {
  return {tensor.data + batch * tensor.strides[0] + row * tensor.strides[1] + head * tensor.strides[2],
          tensor.strides[1], tensor.strides[3], columns};
}

// How the threads share a tile: some take up to 128 bytes of a row, a piece each, and go on below it, so that a thread's
// addresses are sums of its first one and constants. A piece is what one asynchronous copy takes, or two 16-bit elements, for
// which there is none.
template <SmemTile tile> struct Pieces {
  static constexpr int bytes = kCopyBytes != 0 ? kCopyBytes : 4;
  static constexpr int width = min_of(tile.chunk_bytes(), kThreads / 8 * bytes);
  static constexpr int step = kThreads / (width / bytes);  // rows
  static_assert(step % 8 == 0, "rows of a thread have the same swizzle");

  static int row() { return static_cast<int>(threadIdx.x) / (width / bytes); }
  static int byte() { return static_cast<int>(threadIdx.x) % (width / bytes) * bytes; }
  static i64 column(const GlobalRows& from, int byte) {
    return kCopyBytes != 0 ? byte : byte / kElementBytes * from.column_stride;
  }
  // The same rows, from the thread's first piece on.
  static GlobalRows own(GlobalRows from) {
    from.first += row() * from.row_stride + column(from, byte());
    return from;
  }
};

inline u32 load_pair(const char* at, i64 column_stride, bool first, bool second) {
  const u32 low = first ? *reinterpret_cast<const unsigned short*>(at) : 0u;
  const u32 high = second ? *reinterpret_cast<const unsigned short*>(at + column_stride) : 0u;
  return low | high << 16;
}

// own: Pieces::own of the tile's rows. Columns that do not exist and rows outside [begin, end) become 0.
template <SmemTile tile> inline void copy_tile(u32 to, const GlobalRows& own, i32 begin, i32 end) {
  using Piece = Pieces<tile>;
  const int row = Piece::row(), byte = Piece::byte(), bytes = own.columns * kElementBytes - byte;
  const UnitAddress<tile> unit(to + static_cast<u32>(byte % kUnitBytes), row, byte / kUnitBytes);
  const char* source = own.first;
#pragma unroll
  for (int below = 0; below < tile.rows; below += Piece::step, source += Piece::step * own.row_stride) {
    if (tile.rows % Piece::step != 0 && row + below >= tile.rows) break;
    const bool inside = static_cast<u32>(row + below - begin) < static_cast<u32>(end - begin);
#pragma unroll
    for (int at = 0; at < tile.row_bytes; at += Piece::width) {
      const char* const from = source + Piece::column(own, at);
      const u32 address = unit.at(at / kUnitBytes, below);
      if constexpr (kCopyBytes == 0 && kElementBytes == 2)
        store_shared(address, load_pair(from, own.column_stride, inside && at < bytes, inside && at + 2 < bytes));
      else
        copy_async<Piece::bytes>(address, from, inside && at < bytes);
    }
  }
}

inline void store_element(char* at, u32 from) {
  if constexpr (kElementBytes == 2)
    *reinterpret_cast<unsigned short*>(at) = load_shared16(from);
  else
    *reinterpret_cast<u32*>(at) = load_shared(from);
}

// One unit of a row, of which `valid` bytes exist.
inline void store_unit(char* at, u32 from, int valid, i64 column_stride) {
  if (kCopyBytes == kUnitBytes && valid >= kUnitBytes) {
    u32 unit[4];
    load_shared128(from, unit);
    *reinterpret_cast<uint4*>(at) = uint4{unit[0], unit[1], unit[2], unit[3]};
    return;
  }
  for (int byte = 0; byte < min_of(valid, kUnitBytes); byte += kElementBytes)
    store_element(at + byte / kElementBytes * (kCopyBytes != 0 ? i64{kElementBytes} : column_stride),
                  from + static_cast<u32>(byte));
}

// Rows [0, count) of a warp's part of a tile, that begins at row `first` of it.
template <SmemTile tile> inline void store_rows(u32 from, int first, int count, const GlobalRows& to) {
  constexpr int units = tile.row_bytes / kUnitBytes;
  const int bytes = to.columns * kElementBytes, lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int index = lane; index < count * units; index += kWarp) {
    const int row = index / units, unit = index % units, at = unit * kUnitBytes;
    const i64 column = kCopyBytes != 0 ? at : at / kElementBytes * to.column_stride;
    store_unit(to.first + row * to.row_stride + column, from + tile.offset(first + row, unit), bytes - at,
               to.column_stride);
  }
}

}  // namespace narrows
