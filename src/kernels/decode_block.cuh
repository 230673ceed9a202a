// Where a thread block of the sm80 decode kernel finds keys and queries, and where it keeps outputs.
#pragma once
#include "kernels/decode_facts.cuh"
#include "kernels/decode_tiles.cuh"

namespace narrows {

constexpr int kOutputStride = kColumns + 4;  // floats

// Each warp has as many rows as there are.
inline float* output_row(const Block& block, int warp, int r) {
  return block.outputs + (warp * block.facts.packed_rows + r) * kOutputStride;
}

// Where the keys of the block's row lie. Lanes below 16 look for rows of K, the others for rows of V.
class KeyRows : public HeadRows {
 public:
  explicit KeyRows(const Block& block)
      : HeadRows(block, threadIdx.x % kWarp < kTileKeys ? block.args.k : block.args.v) {}

  // Of the lane's key of a tile.
  const char* row(i32 tile, bool early = false) {
    return row_of(tile * kTileKeys + static_cast<i32>(threadIdx.x % kTileKeys), early);
  }
};

// The first tile of the warp: of the block's it takes those whose number, counted from key 0, is its in turn.
inline i32 first_tile_of_warp(const Facts& facts) {
  const i32 warp = __shfl_sync(~0u, static_cast<i32>(threadIdx.x) / kWarp, 0), begin = facts.first_tile;
  return begin + ((warp - begin) & (kWarps - 1));
}

// A tile's rows of K and V to L2. row: as KeyRows gives it, perhaps by what may still change.
inline void fetch_rows(const DecodeArgs& args, const char* row) {
  if (kCopyBytes == 0) return;
  const i32 bytes = (threadIdx.x % kWarp < kTileKeys ? args.head_dim : args.value_dim) * kElementBytes;
#pragma unroll
  for (i32 byte = 0; byte < max_of(kHeadBytes, kValueBytes); byte += 128)
    if (byte < bytes) fetch_line(row + byte);
}

// Whether packed rows are multiplied as they lie in the tensor, and go to registers at once.
constexpr bool kAsksQueries = kKeepsQueries && kCopyBytes != 0 && !kTurnsQueries;

// All packed rows of Q, to shared memory; rows that do not exist are 0.
inline void load_queries(const Block& block) {
  constexpr int kRowPieces = kKeySteps * 64 / kUnitBytes;
  const DecodeArgs& args = block.args;
#pragma unroll 1
  for (int index = static_cast<int>(threadIdx.x); index < kBlockQueries * kRowPieces; index += kThreads) {
    const int r = index / kRowPieces, byte = index % kRowPieces * kUnitBytes;
    const PackedRow row = packed_row(args, block.facts, r);
    const bool given = exists(block.facts, row, r) && byte < args.head_dim * kElementBytes;
    const u32 to = shared_address(block.queries) + static_cast<u32>(r * kQueryStride + byte);
    if (given && (kCopyBytes == 0 || kTurnsQueries)) {
      gather_query(block, row, byte, to);
    } else {
      u32 piece[4] = {0, 0, 0, 0};
      load_stream_if(given, query_row(block, row) + byte, piece);
      store_shared128(to, piece);
    }
  }
}

// Step i of the lane's packed rows.
inline void read_queries(const Block& block, int i, QueryPieces& q) {
  const DecodeLane at;
  const u32 from = shared_address(block.queries) + static_cast<u32>(at.g * kQueryStride + 64 * i + 16 * at.c);
#pragma unroll
  for (u32 r = 0; r < kRows; ++r) load_shared128(from + r * 8 * kQueryStride, q[r][0], q[r][1], q[r][2], q[r][3]);
}

// Where the lane's packed rows are, straight from which it takes them: no barrier, at which warps would wait until the last one's first
// keys have been asked for.
struct QueryPlaces {
  const char* rows[kRows];
  bool given[kRows];

  explicit QueryPlaces(const Block& block) {
    const DecodeLane at;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const PackedRow row = packed_row(block.args, block.facts, 8 * r + at.g);
      given[r] = exists(block.facts, row, 8 * r + at.g);
      rows[r] = query_row(block, row) + 16 * at.c;
    }
  }

  // All steps.
  void ask(const DecodeArgs& args, Queries& q) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int i = 0; i < kKeySteps; ++i) {
        const bool inside = 64 * (i + 1) <= narrower(kHeadDim) * kElementBytes ||
                            64 * i + 16 * DecodeLane().c < args.head_dim * kElementBytes;
        for (u32& word : q[i][r]) word = 0;
        load_stream_if(given[r] && inside, rows[r] + 64 * i, q[i][r]);
      }
  }
};

}  // namespace narrows
