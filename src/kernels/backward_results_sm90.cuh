// dK and dV on their way from the accumulators of a warp to memory, through rows of a tile that it alone still uses.
#pragma once
#include "kernels/backward_steps_sm90.cuh"
#include "kernels/copy_tile.cuh"

namespace narrows {

constexpr i32 kWarpRows = 16;
constexpr u32 kNanPair = 0x7fff7fffu;

// Columns of dK or dV.
struct ResultColumns {
  const TensorArg& tensor;
  i32 first, count;
  float factor;
};

struct ResultRows {
  const KeyBlock& block;
  int key;  // of the block, the warp's first
  int row;  // the same of the tile
  int lane;

  template <SmemTile tile, int n> void store(const float (&sums)[1][n][4], u32 to, const ResultColumns& columns) const {
#pragma unroll
    for (int j = 0; j < n; j += 2) {
      const auto pair = [&](int m) {
        const float* const two = &sums[0][j + m / 2][m % 2 * 2];
        return pack(two[0] * columns.factor, two[1] * columns.factor);
      };
      store_matrices(to + tile.offset(row + lane % 16, j + lane / 16), pair(0), pair(1), pair(2), pair(3));
    }
    __syncwarp();
    const i32 keys = block.broken ? 0 : clamp_to(block.keys - block.first - key, 0, kWarpRows);
    if (keys < kWarpRows) {  // what does not exist
      fill<tile>(to, row + keys, row + kWarpRows, block.broken ? kNanPair : 0);
      __syncwarp();
    }
    if (columns.tensor.data == nullptr) return;
    const i32 rows = min_of(block.rows - key, kWarpRows);
    GlobalRows at =
        rows_of(columns.tensor, block.sequence, block.first_key + block.first + key, block.kv_head, columns.count);
    at.first += columns.first * at.column_stride;
    if (rows == kWarpRows && columns.count * kElementBytes == tile.row_bytes && at.column_stride == kElementBytes &&
        (reinterpret_cast<u64>(at.first) | static_cast<u64>(at.row_stride)) % kUnitBytes == 0)
      store_whole<tile>(to, at);
    else
      store_any_rows<tile>(to, row, rows, at);
  }

 private:
  // The same word everywhere.
  template <SmemTile tile> void fill(u32 to, i32 begin, i32 end, u32 word) const {
    constexpr int units = tile.row_bytes / kUnitBytes;
    for (i32 index = begin * units + lane; index < end * units; index += kWarp)
      store_shared128(to + tile.offset(index / units, index % units), {word, word, word, word});
  }
  // All rows, all of which are whole units: many loads at once.
  template <SmemTile tile> void store_whole(u32 from, const GlobalRows& to) const {
    constexpr int units = tile.row_bytes / kUnitBytes, at_once = kWarp / units, rounds = kWarpRows / at_once;
    const int below = lane / units, unit = lane % units;
    u32 words[rounds][4];
#pragma unroll
    for (int i = 0; i < rounds; ++i)
      load_shared128(from + tile.offset(row + below + i * at_once, unit), words[i][0], words[i][1], words[i][2],
                     words[i][3]);
    char* at = to.first + below * to.row_stride + unit * kUnitBytes;
#pragma unroll
    for (int i = 0; i < rounds; ++i, at += at_once * to.row_stride)
      *reinterpret_cast<uint4*>(at) = uint4{words[i][0], words[i][1], words[i][2], words[i][3]};
  }
};

}  // namespace narrows
