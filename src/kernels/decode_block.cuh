// What a thread block of the decode kernel knows of the row that it works on, and where it finds keys and queries.
#pragma once
#include "kernels/cache_rows.cuh"
#include "kernels/decode_rows.cuh"
#include "kernels/head_rules.cuh"

namespace narrows {

constexpr i32 kMostKey = 0x7fffffff;

// In shared memory.
struct Facts : Share {
  i32 first_row;             // packed, within the sequence
  i32 packed_rows;           // that the tensors have; results are written for these
  i32 first_tile, end_tile;  // of the share
  Keys seen[kBlockQueries];  // by each packed row
  Keys hull, common;         // of what some row sees, and what all do
};

struct PackedRow {
  i32 query, head;
};

inline PackedRow packed_row(const DecodeArgs& args, const Facts& facts, int r) {
  const u32 index = static_cast<u32>(facts.first_row + r), group = static_cast<u32>(args.group), query = index / group;
  return {static_cast<i32>(query), facts.kv_head * args.group + static_cast<i32>(index - query * group)};
}

struct Block {
  const DecodeArgs& args;
  Facts& facts;
  char* queries;   // the packed rows of Q, kQueryStride apart
  float* outputs;  // of each warp, rows kOutputStride apart
  RowSum* sums;    // of each warp
};

constexpr int kOutputStride = kColumns + 4;  // floats

// What row i sees where nothing but the diagonal limits it.
inline Keys plain_keys(const DecodeArgs& args, const CacheFacts& facts, i32 i) {
  const i32 past = static_cast<i32>(facts.shift) + i + 1;
  return {0, args.visibility.right == 0 ? clamp_to(past, 0, facts.keys) : facts.keys};
}

// By the first warp, of a share that it has found.
inline void gather_facts(const DecodeArgs& args, Facts& facts, bool plain) {
  const i32 lane = static_cast<i32>(threadIdx.x);
  const LineSequence& sequence = facts.sequence;
  const i32 first = facts.tile * kBlockQueries;
  const i32 i = static_cast<i32>(static_cast<u32>(first + lane) / static_cast<u32>(args.group));
  const bool exists = lane < kBlockQueries && i < sequence.queries && !sequence.broken;
  Keys seen{0, 0};
  if (exists) seen = plain ? plain_keys(args, sequence, i) : seen_keys(args, sequence, i);
  const bool sees = seen.begin < seen.end;
  const Keys hull{__reduce_min_sync(~0u, sees ? seen.begin : kMostKey), __reduce_max_sync(~0u, sees ? seen.end : 0)};
  const Keys common{__reduce_max_sync(~0u, exists ? seen.begin : 0),
                    __reduce_min_sync(~0u, exists ? seen.end : kMostKey)};
  if (lane < kBlockQueries) facts.seen[lane] = seen;
  if (lane != 0) return;
  facts.first_row = first;
  facts.packed_rows = min_of(sequence.rows * args.group - first, i32{kBlockQueries});
  facts.hull = hull;
  facts.common = common;
  const bool some = hull.begin < hull.end;
  const i32 origin = some ? first_tile(args, hull.begin) : 0, piece = facts.cut.tiles_of_piece;
  facts.first_tile = max_of(origin + facts.begin * piece, hull.begin / kTileKeys);
  facts.end_tile = some ? min_of(origin + facts.end * piece, ceil_div(hull.end, kTileKeys)) : 0;
}

// ---------------------------------------------------------------------------------------------------------------- keys

// Where the keys of the block's row lie. Lanes below 16 look for rows of K, the others for rows of V.
class KeyRows {
 public:
  KeyRows(const Block& block) : block_(block) {
    const TensorArg& from = threadIdx.x % kWarp < kTileKeys ? block.args.k : block.args.v;
    head_ = from.data + block.facts.kv_head * from.strides[2];
    row_stride_ = from.strides[0];
    stride_ = from.strides[1];
  }

  // Of the lane's key of a tile. Keys that no row sees are taken for the nearest that one does: their weight is 0, and what lies
  // in their slots may be NaN.
  const char* row(i32 tile) {
    const Keys hull = block_.facts.hull;
    const CacheFacts& sequence = block_.facts.sequence;
    const i32 key = tile * kTileKeys + static_cast<i32>(threadIdx.x % kTileKeys);
    const i32 slot = sequence.first_key + clamp_to(key, hull.begin, hull.end - 1);
    const Slot at = slot_of(block_.args, sequence, slot);
    if (at.broken) wrong_ = at.entry, broken_ = true;
    return head_ + at.row * row_stride_ + at.number * stride_;
  }

  // Whether an entry of the table was none.
  bool is_broken() const {
    return breaks(block_.args, true, block_.facts.sequence.sequence,
                  broken_ ? Breach{StatusCode::block_table, wrong_, block_.args.pages - 1} : Breach{});
  }

 private:
  const Block& block_;
  bool broken_ = false;
  i32 wrong_ = 0;
  const char* head_;
  i64 row_stride_, stride_;
};

// ------------------------------------------------------------------------------------------------------------- queries

inline const char* query_row(const Block& block, const PackedRow& row) {
  const TensorArg& q = block.args.q;
  const CacheFacts& sequence = block.facts.sequence;
  return q.data + sequence.sequence * q.strides[0] + (sequence.first_query + row.query) * q.strides[1] +
         row.head * q.strides[2];
}

// Elements of a packed row one by one: strided, or turned by their position.
inline void gather_query(const Block& block, const PackedRow& row, int byte, u32 to) {
  const DecodeArgs& args = block.args;
  const i32 first = byte / kElementBytes;
  const i64 position = args.rotary_pairs ? i64{rotary_base(args, block.facts.sequence)} + row.query : 0;
  const char* const from = query_row(block, row);
#pragma unroll 1
  for (i32 i = 0; i < kPieceElements; ++i) {
    const float x = first + i < args.head_dim ? rotated(args, from, args.q.strides[3], position, first + i) : 0.f;
    const u32 at = to + static_cast<u32>(i * kElementBytes);
    if constexpr (kElementBytes == 4)
      store_shared(at, as_bits(x));
    else
      store_shared16(at, static_cast<unsigned short>(pack(x, 0.f)));
  }
}

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
