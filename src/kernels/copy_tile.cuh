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
// addresses are sums of its first one and constants. A piece is what one asynchronous copy takes.
template <SmemTile tile> struct Pieces {
  static constexpr int bytes = kCopyBytes >= 4 ? kCopyBytes : 4;
  static constexpr int width = min_of(tile.chunk_bytes(), kThreads / 8 * bytes);
  static constexpr int step = kThreads / (width / bytes);  // rows
  static_assert(step % 8 == 0, "rows of a thread have the same swizzle");

  static u32 row() { return thread_index() / (width / bytes); }
  static u32 byte() { return thread_index() % (width / bytes) * bytes; }
  static i64 column(const GlobalRows& from, u32 byte) {
    return kCopyBytes != 0 ? i64{byte} : i64{byte / kElementBytes} * from.column_stride;
  }
};

// Rows `first` and further. Columns that do not exist and rows outside [begin, end), begin <= end, become 0.
template <SmemTile tile> inline void copy_pieces(u32 to, const GlobalRows& from, u32 first, i32 begin, i32 end) {
  using Piece = Pieces<tile>;
  const int row = static_cast<int>(Piece::row()), byte = static_cast<int>(Piece::byte());
  const int bytes = from.columns * kElementBytes - byte;
  const UnitAddress<tile> unit(to + static_cast<u32>(byte % kUnitBytes), row, byte / kUnitBytes);
  const char* source = from.first + i64{first + Piece::row()} * from.row_stride + Piece::column(from, Piece::byte());
#pragma unroll
  for (int below = 0; below < tile.rows; below += Piece::step, source += Piece::step * from.row_stride) {
    if (tile.rows % Piece::step != 0 && row + below >= tile.rows) break;
    const bool inside = static_cast<u32>(row + below - begin) < static_cast<u32>(end - begin);
#pragma unroll
    for (int at = 0; at < tile.row_bytes; at += Piece::width)
      copy_async<Piece::bytes>(unit.at(at / kUnitBytes, below), source + Piece::column(from, static_cast<u32>(at)),
                               inside && at < bytes);
  }
}

// 16-bit elements that lie anywhere: no asynchronous copy is that small. Some loads of a thread are in flight at once.
template <SmemTile tile> inline void gather_pairs(u32 to, const GlobalRows& from, u32 first, i32 begin, i32 end) {
  constexpr int pairs = tile.row_bytes / 4, total = tile.rows * pairs, batch = 8;
  for (int start = static_cast<int>(threadIdx.x); start < total; start += batch * kThreads) {
    u32 pair[batch];
#pragma unroll
    for (int n = 0; n < batch; ++n) {
      const int index = start + n * kThreads, row = index / pairs, column = index % pairs * 2;
      const char* const at = from.first + (first + row) * from.row_stride + column * from.column_stride;
      const bool inside = begin <= row && row < end;
      const u32 low = inside && column < from.columns ? *reinterpret_cast<const unsigned short*>(at) : 0u;
      const u32 high =
          inside && column + 1 < from.columns ? *reinterpret_cast<const unsigned short*>(at + from.column_stride) : 0u;
      pair[n] = low | high << 16;
    }
#pragma unroll
    for (int n = 0; n < batch; ++n) {
      const int index = start + n * kThreads, row = index / pairs, byte = index % pairs * 4;
      if (index < total)
        store_shared(to + tile.offset(row, byte / kUnitBytes) + static_cast<u32>(byte % kUnitBytes), pair[n]);
    }
  }
}

template <SmemTile tile> inline void copy_tile(u32 to, const GlobalRows& from, u32 first, i32 begin, i32 end) {
  if constexpr (kCopyBytes < 4 && kElementBytes == 2)
    gather_pairs<tile>(to, from, first, begin, end);
  else
    copy_pieces<tile>(to, from, first, begin, end);
}

// Rows of 16-bit elements that begin anywhere (kCopyBytes 2) come in two steps: the units of 16 bytes that they touch, one more
// than a tile's row has, and from there to the tile, shifted. Neither bytes before a row nor behind it reach the tile. Rows
// that are 8 apart begin at the same place of a unit, so a thread shifts all of its units alike.
template <SmemTile tile> struct RawRows {
  static constexpr int row_bytes = tile.row_bytes + kUnitBytes, bytes = tile.rows * row_bytes;
  static constexpr int units = tile.chunk_units(), step = kThreads / units;  // of a row that neighbours take; rows
  static_assert(kCopyBytes != 2 || step % 8 == 0, "a thread's rows begin at the same place of a unit");

  int row = static_cast<int>(thread_index()) / units, unit = static_cast<int>(thread_index()) % units;
  u32 shift;  // bytes, even

  RawRows(const GlobalRows& from)
      : shift(static_cast<u32>(reinterpret_cast<u64>(from.first + row * from.row_stride)) % kUnitBytes) {}
};

// The last unit that a row touches: `valid` bytes of it, even, then zeros. Nothing behind them is read.
inline void copy_row_end(u32 to, const char* from, int valid) {
  for (int byte = 0; byte < kUnitBytes; byte += 4) {
    const u32 word = to + static_cast<u32>(byte);
    if (valid - byte >= 4)
      copy_async<4>(word, from + byte, true);
    else
      store_shared(word, valid - byte >= 2 ? *reinterpret_cast<const unsigned short*>(from + byte) : 0u);
  }
}

template <SmemTile tile> inline void copy_raw(u32 to, const GlobalRows& from, u32 first, i32 begin, i32 end) {
  using Raw = RawRows<tile>;
  constexpr int last = tile.row_bytes / kUnitBytes;
  const Raw raw(from);
  const int bytes = from.columns * kElementBytes;
  const int whole = (bytes + static_cast<int>(raw.shift)) / kUnitBytes;  // units
  const char* start = from.first + (first + raw.row) * from.row_stride - raw.shift;
#pragma unroll
  for (int below = 0; below < tile.rows; below += Raw::step, start += Raw::step * from.row_stride) {
    const int row = raw.row + below;
    if (tile.rows % Raw::step != 0 && row >= tile.rows) break;
    const bool inside = begin <= row && row < end;
    const u32 at = to + static_cast<u32>(row * Raw::row_bytes);
#pragma unroll
    for (int unit = raw.unit; unit < last; unit += Raw::units)
      if (!inside || unit != whole)
        copy_async<kUnitBytes>(at + static_cast<u32>(unit * kUnitBytes), start + unit * kUnitBytes,
                               inside && unit < whole);
  }
  for (int row = static_cast<int>(threadIdx.x); row < tile.rows; row += kThreads) {
    const char* const row_start = from.first + (first + static_cast<u32>(row)) * from.row_stride;
    const int shift = static_cast<int>(reinterpret_cast<u64>(row_start) % kUnitBytes),
              unit = (bytes + shift) / kUnitBytes;
    const bool inside = begin <= row && row < end;
    const u32 at = to + static_cast<u32>(row * Raw::row_bytes);
    if (inside)
      copy_row_end(at + static_cast<u32>(unit * kUnitBytes), row_start - shift + unit * kUnitBytes,
                   (bytes + shift) % kUnitBytes);
    if (!inside || unit != last) copy_row_end(at + last * kUnitBytes, row_start, 0);
  }
}

template <SmemTile tile> inline void shift_rows(u32 to, u32 from, const GlobalRows& rows) {
  using Raw = RawRows<tile>;
  const Raw raw(rows);
  const UnitAddress<tile> target(to, raw.row, raw.unit);
  const u32 source = from + static_cast<u32>(raw.row * Raw::row_bytes + raw.unit * kUnitBytes);
#pragma unroll
  for (int below = 0; below < tile.rows; below += Raw::step) {
    if (tile.rows % Raw::step != 0 && raw.row + below >= tile.rows) break;
#pragma unroll
    for (int unit = 0; unit < tile.row_bytes / kUnitBytes; unit += Raw::units) {
      const u32 at = source + static_cast<u32>(below * Raw::row_bytes + unit * kUnitBytes);
      u32 words[8], shifted[4];
      load_shared128(at, words[0], words[1], words[2], words[3]);
      load_shared128(at + kUnitBytes, words[4], words[5], words[6], words[7]);
#pragma unroll
      for (int w = 0; w < 6; ++w) words[w] = raw.shift / 8 != 0 ? words[w + 2] : words[w];
#pragma unroll
      for (int w = 0; w < 5; ++w) words[w] = raw.shift / 4 % 2 != 0 ? words[w + 1] : words[w];
#pragma unroll
      for (int w = 0; w < 4; ++w) shifted[w] = __funnelshift_r(words[w], words[w + 1], raw.shift % 4 * 8);
      store_shared128(target.at(unit, below), shifted);
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
    load_shared128(from, unit[0], unit[1], unit[2], unit[3]);
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

// The same where nothing is known of `to`: whole units if they are aligned there.
template <SmemTile tile> inline void store_any_rows(u32 from, int first, int count, const GlobalRows& to) {
  constexpr int units = tile.row_bytes / kUnitBytes;
  const int bytes = to.columns * kElementBytes, lane = static_cast<int>(threadIdx.x) % kWarp;
  const bool aligned = to.column_stride == kElementBytes &&
                       (reinterpret_cast<u64>(to.first) | static_cast<u64>(to.row_stride)) % kUnitBytes == 0;
  for (int index = lane; index < count * units; index += kWarp) {
    const int row = index / units, unit = index % units, at = unit * kUnitBytes;
    char* const start = to.first + row * to.row_stride;
    const u32 source = from + tile.offset(first + row, unit);
    if (aligned && bytes - at >= kUnitBytes) {
      u32 words[4];
      load_shared128(source, words[0], words[1], words[2], words[3]);
      *reinterpret_cast<uint4*>(start + at) = uint4{words[0], words[1], words[2], words[3]};
    } else {
      for (int byte = 0; byte < min_of(bytes - at, kUnitBytes); byte += kElementBytes)
        store_element(start + (at + byte) / kElementBytes * to.column_stride, source + static_cast<u32>(byte));
    }
  }
}

}  // namespace narrows
