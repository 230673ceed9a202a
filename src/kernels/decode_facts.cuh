// What a thread block of a decode kernel knows of the row that it works on, and where it finds keys and query rows.
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

struct Block {
  const DecodeArgs& args;
  Facts& facts;
  char* queries;   // the packed rows of Q
  float* outputs;  // rows kOutputStride apart
  RowSum* sums;    // of these
};

// By the first warp, of a share that it has found: what its rows see.
inline void gather_rows(const DecodeArgs& args, Facts& facts) {
  const i32 lane = static_cast<i32>(threadIdx.x);
  const LineSequence& sequence = facts.sequence;
  const i32 first = facts.tile * kBlockQueries;
  Keys hull{kMostKey, 0}, common{0, kMostKey};
#pragma unroll
  for (i32 r = lane; r < kBlockQueries; r += kWarp) {
    const i32 i = args.by_group.quotient(first + r);
    const bool exists = i < sequence.queries && !sequence.broken;
    const Keys seen = exists ? seen_keys(args, sequence, i) : Keys{0, 0};
    if (seen.begin < seen.end) hull = {min_of(hull.begin, seen.begin), max_of(hull.end, seen.end)};
    if (exists) common = {max_of(common.begin, seen.begin), min_of(common.end, seen.end)};
    facts.seen[r] = seen;
  }
  hull = {__reduce_min_sync(~0u, hull.begin), __reduce_max_sync(~0u, hull.end)};
  common = {__reduce_max_sync(~0u, common.begin), __reduce_min_sync(~0u, common.end)};
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

// Where rows of K or of V lie that a thread asks for.
class HeadRows {
 public:
  HeadRows(const Block& block, const TensorArg& from) : block_(block) {
    head_ = from.data + static_cast<u32>(block.facts.kv_head) * from.strides[2];
    row_stride_ = from.strides[0];
    stride_ = from.strides[1];
  }

  // Keys that no row sees are taken for the nearest that one does: their weight is 0, and what lies in their slots may be NaN.
  const char* row_of(i32 key, bool early = false) {
    const Keys hull = block_.facts.hull;
    const CacheFacts& sequence = block_.facts.sequence;
    const i32 slot = sequence.first_key + clamp_to(key, hull.begin, hull.end - 1);
    const Slot at = slot_of(block_.args, sequence.row, slot, early);
    if (at.broken && !early) wrong_ = at.entry, broken_ = true;
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

}  // namespace narrows
