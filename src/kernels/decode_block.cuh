// What a thread block of the decode kernel knows of the row that it works on, and where it finds keys and queries.
#pragma once
#include "kernels/cache_rows.cuh"
#include "kernels/decode_rows.cuh"
#include "kernels/head_rules.cuh"

namespace narrows {

constexpr i32 kMostKey = 0x7fffffff;

// In shared memory.
struct Facts {
  Share share;
  bool whole;        // it is all of the row
  PartSlots owners;  // thread blocks that have some of it
  CacheFacts sequence;
  i32 first_row;             // packed, within the sequence
  i32 rows;                  // packed, that the tensors have; results are written for these
  Keys seen[kBlockQueries];  // by each packed row
  Keys hull, common;         // of what some row sees, and what all do
};

struct PackedRow {
  i32 query, head;
};

inline PackedRow packed_row(const DecodeArgs& args, const Facts& facts, int r) {
  const i32 index = facts.first_row + r;
  return {index / args.group, facts.share.row.kv_head * args.group + index % args.group};
}

struct Block {
  const DecodeArgs& args;
  Facts& facts;
  char* queries;   // the packed rows of Q, kQueryStride apart
  float* outputs;  // of each warp, rows kOutputStride apart
  RowSum* sums;    // of each warp
};

constexpr int kOutputStride = kColumns + 4;  // floats

// Leaves the facts of the share where every thread finds them; by the first warp.
inline void gather_facts(const Block& block, const LineState& line, const Share& share) {
  Facts& facts = block.facts;
  const DecodeArgs& args = block.args;
  const RowPlace& row = share.row;
  const i32 lane = static_cast<i32>(threadIdx.x);
  const Part queries = query_part(args, row.sequence, line.broken);
  CacheFacts sequence{};
  sequence.sequence = row.sequence;
  sequence.first_query = queries.begin;
  sequence.broken = line.broken;
  if (!line.broken && row.sequence < args.batch) sequence = cache_facts(args, queries, false);
  const i32 first = row.tile * kBlockQueries, i = (first + lane) / args.group;
  const bool exists = lane < kBlockQueries && i < sequence.queries && !sequence.broken;
  const Keys seen = exists ? seen_keys(args, sequence, i) : Keys{0, 0};
  const bool sees = seen.begin < seen.end;
  const Keys hull{__reduce_min_sync(~0u, sees ? seen.begin : kMostKey), __reduce_max_sync(~0u, sees ? seen.end : 0)};
  const Keys common{__reduce_max_sync(~0u, exists ? seen.begin : 0),
                    __reduce_min_sync(~0u, exists ? seen.end : kMostKey)};
  if (lane < kBlockQueries) facts.seen[lane] = seen;
  if (lane != 0) return;
  facts.share = share;
  facts.whole = share.begin == 0 && share.end == row.cut.pieces;
  if (!facts.whole || args.fixed_split != 0) facts.owners = part_slots(line.deal, row.first, row.cut.pieces);
  facts.sequence = sequence;
  facts.first_row = first;
  facts.rows = static_cast<i32>(min_of(i64{queries.count} * args.group - first, i64{kBlockQueries}));
  facts.hull = hull;
  facts.common = common;
}

// ---------------------------------------------------------------------------------------------------------------- keys

// Where the keys of the block's row lie. Lanes below 16 look for rows of K, the others for rows of V.
class KeyRows {
 public:
  KeyRows(const Block& block) : block_(block), values_(threadIdx.x % kWarp >= kTileKeys) {
    const TensorArg& from = tensor();
    head_ = from.data + block.facts.share.row.kv_head * from.strides[2];
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
    const TensorArg& from = tensor();
    return head_ + at.row * from.strides[0] + at.number * from.strides[1];
  }

  // Whether an entry of the table was none.
  bool is_broken() const {
    return breaks(block_.args, true, block_.facts.sequence.sequence,
                  broken_ ? Breach{StatusCode::block_table, wrong_, block_.args.pages - 1} : Breach{});
  }

 private:
  const TensorArg& tensor() const { return values_ ? block_.args.v : block_.args.k; }

  const Block& block_;
  bool values_, broken_ = false;
  i32 wrong_ = 0;
  const char* head_;
};

// ------------------------------------------------------------------------------------------------------------- queries

inline const char* query_row(const Block& block, const PackedRow& row) {
  const TensorArg& q = block.args.q;
  const CacheFacts& sequence = block.facts.sequence;
  return q.data + sequence.sequence * q.strides[0] + (sequence.first_query + row.query) * q.strides[1] +
         row.head * q.strides[2];
}

inline bool has_query(const Block& block, int r) {
  return packed_row(block.args, block.facts, r).query < block.facts.sequence.queries && r < block.facts.rows;
}

// 16 bytes of a packed row.
inline void query_piece(const Block& block, int r, int byte, u32 (&piece)[4]) {
  const DecodeArgs& args = block.args;
  const i32 first = byte / kElementBytes, columns = min_of(args.head_dim - first, kPieceElements);
  for (u32& word : piece) word = 0;
  if (columns <= 0 || !has_query(block, r)) return;
  const PackedRow row = packed_row(args, block.facts, r);
  const char* from = query_row(block, row);
  if (kCopyBytes != 0 && args.rotary_pairs == 0) return load_stream(from + byte, piece);
  const i64 position = args.rotary_pairs ? i64{rotary_base(args, block.facts.sequence)} + row.query : 0;
#pragma unroll
  for (int i = 0; i < kPieceElements; ++i) {
    const float x = i < columns ? rotated(args, from, args.q.strides[3], position, first + i) : 0.f;
    if constexpr (kElementBytes == 4)
      piece[i] = as_bits(x);
    else
      piece[i / 2] |= (pack(x, 0.f) & 0xffffu) << i % 2 * 16;
  }
}

// All packed rows of Q; rows that do not exist are 0.
inline void load_queries(const Block& block) {
  constexpr int pieces = kKeySteps * 64 / kUnitBytes;
  for (int index = static_cast<int>(threadIdx.x); index < kBlockQueries * pieces; index += kThreads) {
    const int r = index / pieces, byte = index % pieces * kUnitBytes;
    u32 piece[4];
    query_piece(block, r, byte, piece);
    store_shared128(shared_address(block.queries) + static_cast<u32>(r * kQueryStride + byte), piece);
  }
}

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
