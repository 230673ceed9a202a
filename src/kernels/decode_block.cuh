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
  const auto [query, head] = args.by_group.divide(facts.first_row + r);
  return {query, facts.kv_head * args.group + head};
}

constexpr int kOutputStride = kColumns + 4;  // floats

struct Block {
  const DecodeArgs& args;
  Facts& facts;
  char* queries;   // the packed rows of Q, kQueryStride apart
  float* outputs;  // of each warp, as many rows as there are
  RowSum* sums;    // of each warp

  float* output_row(int warp, int r) const { return outputs + (warp * facts.packed_rows + r) * kOutputStride; }
};

// By the first warp, of a share that it has found: what its rows see.
inline void gather_rows(const DecodeArgs& args, Facts& facts) {
  const i32 lane = static_cast<i32>(threadIdx.x);
  const LineSequence& sequence = facts.sequence;
  const i32 first = facts.tile * kBlockQueries;
  const i32 i = args.by_group.quotient(first + lane);
  const bool exists = lane < kBlockQueries && i < sequence.queries && !sequence.broken;
  Keys seen{0, 0};
  if (exists) seen = seen_keys(args, sequence, i);
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
}

// Then, by its first thread, which tiles.
inline void gather_tiles(const DecodeArgs& args, Facts& facts) {
  const Keys hull = facts.hull;
  const bool some = hull.begin < hull.end;
  const i32 origin = some ? first_tile(args, hull.begin) : 0, piece = facts.cut.tiles_of_piece;
  facts.first_tile = max_of(origin + facts.begin * piece, hull.begin / kTileKeys);
  facts.end_tile = some ? min_of(origin + facts.end * piece, ceil_div(hull.end, kTileKeys)) : 0;
}

// ---------------------------------------------------------------------------------------------------------------- keys

// Where the keys of the block's row lie. Lanes below 16 look for rows of K, the others for rows of V.
class KeyRows {
 public:
  explicit KeyRows(const Block& block) : block_(block) {
    const TensorArg& from = threadIdx.x % kWarp < kTileKeys ? block.args.k : block.args.v;
    head_ = from.data + static_cast<u32>(block.facts.kv_head) * from.strides[2];
    row_stride_ = from.strides[0];
    stride_ = from.strides[1];
  }

  // Of the lane's key of a tile. Keys that no row sees are taken for the nearest that one does: their weight is 0, and what lies
  // in their slots may be NaN.
  const char* row(i32 tile) {
    const Keys hull = block_.facts.hull;
    const CacheFacts& sequence = block_.facts.sequence;
    const i32 key = tile * kTileKeys + static_cast<i32>(threadIdx.x % kTileKeys);
    const Slot at = slot_of(block_.args, sequence.row, sequence.first_key + clamp_to(key, hull.begin, hull.end - 1));
    if (at.broken) wrong_ = at.entry, broken_ = true;
    return head_ + static_cast<u32>(at.row) * row_stride_ + static_cast<u32>(at.number) * stride_;
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
  return q.data + static_cast<u32>(sequence.sequence) * q.strides[0] +
         static_cast<u32>(sequence.first_query + row.query) * q.strides[1] + static_cast<u32>(row.head) * q.strides[2];
}

// Elements of a packed row one by one: strided, or turned by their position.
inline void gather_query(const Block& block, const PackedRow& row, int byte, u32 to) {
  const DecodeArgs& args = block.args;
  const i32 first = byte / kElementBytes;
  const i64 position = kTurnsQueries ? i64{rotary_base(args, block.facts.sequence)} + row.query : 0;
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

inline bool exists(const Facts& facts, const PackedRow& row, int r) {
  return row.query < facts.sequence.queries && r < facts.packed_rows;
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

// All steps of the lane's packed rows straight from memory: no barrier, at which warps would wait until the last one's first keys have
// been asked for.
inline void ask_queries(const Block& block, Queries& q) {
  const DecodeLane at;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const PackedRow row = packed_row(block.args, block.facts, 8 * r + at.g);
    const bool given = exists(block.facts, row, 8 * r + at.g);
    const char* const from = query_row(block, row) + 16 * at.c;
#pragma unroll
    for (int i = 0; i < kKeySteps; ++i) {
      const bool inside = 64 * (i + 1) <= narrower(kHeadDim) * kElementBytes ||
                          64 * i + 16 * at.c < block.args.head_dim * kElementBytes;
      for (u32& word : q[i][r]) word = 0;
      load_stream_if(given && inside, from + 64 * i, q[i][r]);
    }
  }
}

}  // namespace narrows
