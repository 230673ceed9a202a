// Where a thread block of the sm80 decode kernel finds keys and queries.
#pragma once
#include "kernels/decode_facts.cuh"
#include "kernels/decode_tiles.cuh"

namespace narrows {

constexpr int kOutputStride = kColumns + 4;  // floats

// Where the keys of the block's row lie. Lanes below 16 look for rows of K, the others for rows of V.
class KeyRows : public HeadRows {
 public:
  KeyRows(const Block& block) : HeadRows(block, threadIdx.x % kWarp < kTileKeys ? block.args.k : block.args.v) {}

  // Of the lane's key of a tile.
  const char* row(i32 tile) { return row_of(tile * kTileKeys + static_cast<i32>(threadIdx.x % kTileKeys)); }
};

// All packed rows of Q, to shared memory; rows that do not exist are 0. What a thread asks for first it stores last.
class QueryLoad {
 public:
  explicit QueryLoad(const Block& block) : block_(block) { begin(static_cast<int>(threadIdx.x)); }

  void finish() {
#pragma unroll 1
    for (int index = static_cast<int>(threadIdx.x);;) {
      if (index < kPieces && !gathers_) store_shared128(place_, piece_);
      index += kThreads;
      if (index >= kPieces) return;
      begin(index);
    }
  }

 private:
  static constexpr int kRowPieces = kKeySteps * 64 / kUnitBytes, kPieces = kBlockQueries * kRowPieces;

  void begin(int index) {
    const DecodeArgs& args = block_.args;
    const int r = index / kRowPieces, byte = index % kRowPieces * kUnitBytes;
    const PackedRow row = packed_row(args, block_.facts, r);
    const bool exists = row.query < block_.facts.sequence.queries && r < block_.facts.packed_rows &&
                        byte < args.head_dim * kElementBytes;
    place_ = shared_address(block_.queries) + static_cast<u32>(r * kQueryStride + byte);
    gathers_ = exists && (kCopyBytes == 0 || args.rotary_pairs != 0);
    for (u32& word : piece_) word = 0;
    if (gathers_)
      gather_query(block_, row, byte, place_);
    else
      load_stream_if(exists, query_row(block_, row) + byte, piece_);
  }

  const Block& block_;
  u32 place_;
  bool gathers_;
  u32 piece_[4];
};

// Step i of the lane's packed rows.
inline void read_queries(const Block& block, int i, QueryPieces& q) {
  const DecodeLane at;
  const u32 from = shared_address(block.queries) + static_cast<u32>(at.g * kQueryStride + 64 * i + 16 * at.c);
  load_shared128(from, q[0][0], q[0][1], q[0][2], q[0][3]);
  if constexpr (kRows == 2) {
    load_shared128(from + 8 * kQueryStride, q[1][0], q[1][1], q[1][2], q[1][3]);
  } else {
#pragma unroll
    for (int n = 0; n < 4; ++n) q[1][n] = 0;
  }
}

}  // namespace narrows
