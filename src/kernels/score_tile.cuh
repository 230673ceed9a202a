// A tile of a bias or of a mask in shared memory. Each warp brings the rows that its lanes will read, while it computes the tile
// before: no other warp has to wait for them.
#pragma once
#include "kernels/query_block.cuh"

namespace narrows {

constexpr int kRows = 2 * kRowTiles;  // of scores that a lane holds a quarter of

// Where a lane's accumulators are.
struct LanePlace {
  i32 lane = static_cast<i32>(threadIdx.x % kWarp);
  i32 first_row = static_cast<i32>(threadIdx.x / kWarp) * kWarpRows;  // of the warp, within the block

  i32 row(int r) const { return first_row + r / 2 * 16 + r % 2 * 8 + lane / 4; }  // r in [0, kRows)
  i32 column(int j, int e) const { return 8 * j + lane % 4 * 2 + e; }
};

constexpr int kBiasBytes = kBiasElement == Element::fp16 || kBiasElement == Element::bf16 ? 2 : 4;  // on chip
constexpr SmemTile kBiasTile{kBlockQueries, max_of(kBlockKeys* kBiasBytes, 64)};
constexpr SmemTile kMaskTile{kBlockQueries, max_of(kBlockKeys, 64)};

// The elements of one sequence and head.
struct ScoreSource {
  const char* first;  // of row 0 and key 0
  i64 row_stride, key_stride;
  i32 rows, keys;  // that exist
  i32 piece;       // bytes that one asynchronous copy may take, 16 or 4, whole ones of each row; 0: element by element

  ScoreSource(const TensorArg& tensor, const QueryBlock& block, int bytes)
      : first(tensor.data + block.sequence * tensor.strides[0] + block.head * tensor.strides[1] +
              block.first_row * tensor.strides[2]),
        row_stride(tensor.strides[2]),
        key_stride(tensor.strides[3]),
        rows(block.queries - block.first_row),
        keys(block.keys) {
    const u64 misaligned =
        reinterpret_cast<u64>(first) | static_cast<u64>(row_stride) | static_cast<u64>(keys) * static_cast<u64>(bytes);
    piece = key_stride != bytes ? 0 : misaligned % 16 == 0 ? 16 : misaligned % 4 == 0 ? 4 : 0;
  }
};

// The warp's rows of a tile that begins with key `first_key`, in pieces of a row.
template <SmemTile tile, int bytes, int piece>
inline void copy_score_pieces(u32 to, const ScoreSource& from, i32 first_key) {
  constexpr int pieces = kBlockKeys * bytes / piece;
  const i32 lane = static_cast<i32>(threadIdx.x % kWarp), first_row = static_cast<i32>(threadIdx.x / kWarp) * kWarpRows;
  for (i32 index = lane; index < kWarpRows * pieces; index += kWarp) {
    const i32 row = first_row + index / pieces, byte = index % pieces * piece, key = first_key + byte / bytes;
    copy_async<piece>(to + tile.offset(row, byte / kUnitBytes) + static_cast<u32>(byte % kUnitBytes),
                      from.first + row * from.row_stride + i64{key} * bytes, row < from.rows && key < from.keys);
  }
}

// The same of elements that lie anywhere; those that do not exist are not read. store(address, source) converts one.
template <SmemTile tile, int bytes, class Store>
inline void gather_scores(u32 to, const ScoreSource& from, i32 first_key, const Store& store) {
  const i32 lane = static_cast<i32>(threadIdx.x % kWarp), first_row = static_cast<i32>(threadIdx.x / kWarp) * kWarpRows;
  const i32 rows = min_of(from.rows - first_row, kWarpRows), keys = min_of(from.keys - first_key, kBlockKeys);
  for (i32 row = first_row; row < first_row + rows; ++row)
    for (i32 key = lane; key < keys; key += kWarp) {
      const u32 byte = static_cast<u32>(key * bytes);
      store(to + tile.offset(row, static_cast<int>(byte) / kUnitBytes) + byte % kUnitBytes,
            from.first + row * from.row_stride + i64{first_key + key} * from.key_stride);
    }
}

inline void load_bias(u32 to, const ForwardArgs& args, const QueryBlock& block, i32 first_key) {
  const ScoreSource from(args.bias, block, element_bytes(kBiasElement));
  if (kBiasElement != Element::fp64 && from.piece == 16)
    return copy_score_pieces<kBiasTile, kBiasBytes, 16>(to, from, first_key);
  if (kBiasElement != Element::fp64 && from.piece == 4)
    return copy_score_pieces<kBiasTile, kBiasBytes, 4>(to, from, first_key);
  gather_scores<kBiasTile, kBiasBytes>(to, from, first_key, [](u32 address, const char* source) {
    if constexpr (kBiasBytes == 2)
      store_shared16(address, *reinterpret_cast<const unsigned short*>(source));
    else
      store_shared(address, as_bits(load_element(source, kBiasElement)));
  });
}

inline void load_mask(u32 to, const ForwardArgs& args, const QueryBlock& block, i32 first_key) {
  const ScoreSource from(args.mask, block, 1);
  if (from.piece == 16) return copy_score_pieces<kMaskTile, 1, 16>(to, from, first_key);
  if (from.piece == 4) return copy_score_pieces<kMaskTile, 1, 4>(to, from, first_key);
  gather_scores<kMaskTile, 1>(
      to, from, first_key, [](u32 address, const char* source) { store_shared8(address, static_cast<u32>(*source)); });
}

// Two neighbours, the first in an even column.
inline void read_bias(float (&x)[2], u32 tile, i32 row, i32 column) {
  const int byte = column * kBiasBytes;
  const u32 at = tile + kBiasTile.offset(row, byte / kUnitBytes) + static_cast<u32>(byte % kUnitBytes);
  if constexpr (kBiasBytes == 4) {
    u32 pair[2];
    load_shared64(at, pair);
    x[0] = as_float(pair[0]);
    x[1] = as_float(pair[1]);
  } else {
    const u32 pair = load_shared(at);
    x[0] = kBiasElement == Element::fp16 ? widen_fp16(static_cast<unsigned short>(pair)) : as_float(pair << 16);
    x[1] = kBiasElement == Element::fp16 ? widen_fp16(static_cast<unsigned short>(pair >> 16))
                                         : as_float(pair & 0xffff0000u);
  }
}

inline u32 read_mask(u32 tile, i32 row, i32 column) {
  return load_shared16(tile + kMaskTile.offset(row, column / kUnitBytes) + static_cast<u32>(column % kUnitBytes));
}

}  // namespace narrows
