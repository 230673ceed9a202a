// New keys and values to a cache or to pages, keys turned by their positions, before the decode kernel reads them. Thread
// blocks take every so many of a sequence's new rows. A sequence that breaks a rule gets none, and its results become NaN: the
// decode kernel is told, whose thread blocks each read only some of the table.
#include "kernels/cache_rows.cuh"

namespace narrows {

// From the first to the last key that a row of the sequence sees. Rows with bounds of their own are looked at one by one, by
// every warp.
inline Keys seen_by_rows(const DecodeArgs& args, const CacheFacts& facts) {
  const RowBounds bounds = row_bounds(args, facts);
  if (bounds.same_for_all()) {
    const Range all = key_range(args.visibility, bounds, {0, facts.queries}, facts.shift, facts.keys);
    return {static_cast<i32>(all.begin), static_cast<i32>(all.end)};
  }
  Keys hull{facts.keys, 0};
#pragma unroll 1
  for (i32 i = static_cast<i32>(threadIdx.x % kWarp); i < facts.queries; i += kWarp) {
    const Keys seen = seen_keys(args, facts, i);
    if (seen.begin < seen.end) hull = {min_of(hull.begin, seen.begin), max_of(hull.end, seen.end)};
  }
  return {__reduce_min_sync(~0u, hull.begin), __reduce_max_sync(~0u, hull.end)};
}

// Whether the table's entries between the first and the last key that a row sees, and those of new keys, are pages.
inline bool has_pages(const DecodeArgs& args, const CacheFacts& facts, bool reports) {
  if (args.table == nullptr) return true;
  bool broken = false;
  const auto look = [&](i64 begin, i64 end) {  // slots
    if (begin >= end) return;
    for (i64 page = begin / args.page_size + threadIdx.x; page * args.page_size < end; page += kThreads) {
      const i32 entry = args.table[facts.row * args.table_row + page * args.table_stride];
      broken |= breaks(args, reports, facts.sequence, value_breach(StatusCode::block_table, entry, args.pages - 1));
    }
  };
  const Keys seen = seen_by_rows(args, facts);
  look(i64{facts.first_key} + seen.begin, i64{facts.first_key} + seen.end);
  look(facts.filled, i64{facts.filled} + facts.new_keys);
  return !__syncthreads_or(broken);
}

// Elements [first, first + 16 bytes) of a row, the first `turned` of the row by the angles of its position.
inline void append_piece(const DecodeArgs& args, const char* from, i64 from_stride, char* to, i64 to_stride, i32 first,
                         i32 columns, i32 turned, i64 position) {
  const bool adjoin = from_stride == kElementBytes && to_stride == kElementBytes && first + kPieceElements <= columns;
  char* const target = to + first * to_stride;
  const char* const source = from + first * from_stride;
  if (first >= turned && adjoin && (reinterpret_cast<u64>(source) | reinterpret_cast<u64>(target)) % kUnitBytes == 0) {
    *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(source);
    return;
  }
  for (i32 x = first; x < min_of(first + kPieceElements, columns); ++x) {
    if (x < turned)
      store_number(to + x * to_stride, kElement, rotated(args, from, from_stride, position, x));
    else if constexpr (kElementBytes == 4)
      *reinterpret_cast<u32*>(to + x * to_stride) = *reinterpret_cast<const u32*>(from + x * from_stride);
    else
      *reinterpret_cast<unsigned short*>(to + x * to_stride) =
          *reinterpret_cast<const unsigned short*>(from + x * from_stride);
  }
}

// New row t: of every kv head the pieces of K, then those of V.
inline void append_row(const DecodeArgs& args, const CacheFacts& facts, i32 t) {
  const i32 key_pieces = ceil_div(args.head_dim, kPieceElements),
            value_pieces = ceil_div(args.value_dim, kPieceElements);
  const i32 pieces = key_pieces + value_pieces;
  const Slot slot = slot_of(args, facts.row, facts.filled + t);
  for (i32 index = static_cast<i32>(threadIdx.x); index < args.kv_heads * pieces; index += kThreads) {
    const i32 head = index / pieces, piece = index % pieces;
    const bool is_key = piece < key_pieces;
    const TensorArg &source = is_key ? args.k_new : args.v_new, &target = is_key ? args.k : args.v;
    const char* const from = source.data + facts.sequence * source.strides[0] +
                             (facts.first_new + t) * source.strides[1] + head * source.strides[2];
    char* const to =
        target.data + slot.row * target.strides[0] + slot.number * target.strides[1] + head * target.strides[2];
    const i32 first = (is_key ? piece : piece - key_pieces) * kPieceElements;
    append_piece(args, from, source.strides[3], to, target.strides[3], first, is_key ? args.head_dim : args.value_dim,
                 is_key ? 2 * args.rotary_pairs : 0, facts.filled + t);
  }
}

}  // namespace narrows

extern "C" __global__ void __launch_bounds__(narrows::kThreads)
    append_sm80(const __grid_constant__ narrows::DecodeArgs args) {
  using namespace narrows;
  wait_for_previous();
  let_next_begin();
  const i32 sequence = static_cast<i32>(blockIdx.x) % args.batch, first = static_cast<i32>(blockIdx.x) / args.batch;
  const i32 blocks = static_cast<i32>(gridDim.x) / args.batch;
  const bool reports = first == 0;
  // Bounds that break make every row of the call NaN.
  const bool no_bounds = bounds_break(args, query_bounds(args), blockIdx.x == 0);
  const CacheFacts facts =
      cache_facts(args, part_of(args, query_bounds(args), sequence, false), reports && threadIdx.x == 0);
  const bool refused = no_bounds || facts.broken || !has_pages(args, facts, reports);
  if (args.refused && first == 0 && threadIdx.x == 0) args.refused[sequence] = refused;
  if (refused) return;
  for (i32 t = first; t < facts.new_keys; t += blocks) append_row(args, facts, t);
}
