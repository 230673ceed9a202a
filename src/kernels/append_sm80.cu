// New keys and values to a cache or to pages, keys turned by their positions, before the decode kernel reads them. Thread blocks
// take every so many of a sequence's new rows. A sequence that breaks a rule gets none.
#include "kernels/cache_rows.cuh"

namespace narrows {

// Whether all pages in which a row sees a key, or a new key belongs, are pages.
inline bool has_pages(const DecodeArgs& args, const CacheFacts& facts, bool reports) {
  if (args.table == nullptr) return true;
  const Range seen = key_range(args.visibility, {0, facts.queries}, facts.shift, facts.keys);
  const i64 first_new = facts.keys - facts.new_keys;
  const bool sees = seen.begin < seen.end;
  const i64 begin = facts.first_key + (sees ? min_of(seen.begin, first_new) : first_new);
  const i64 between =
      facts.first_key + (sees ? seen.end : first_new);  // pages from here to the first new key are not read
  bool broken = false;
  for (i64 page = begin / args.page_size + threadIdx.x; page * args.page_size < facts.first_key + facts.keys;
       page += kThreads) {
    if (page * args.page_size >= between && (page + 1) * args.page_size <= facts.first_key + first_new) continue;
    const i32 entry = args.table[facts.row * args.table_row + page * args.table_stride];
    broken |= breaks(args, reports, facts.sequence, value_breach(StatusCode::block_table, entry, args.pages - 1));
  }
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
  const Slot slot = slot_of(args, facts, facts.filled + t);
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
  const i32 sequence = static_cast<i32>(blockIdx.x) % args.batch, first = static_cast<i32>(blockIdx.x) / args.batch;
  const i32 blocks = static_cast<i32>(gridDim.x) / args.batch;
  const bool reports = first == 0;
  Part queries{sequence, 0, args.query_rows, false};
  if (args.cu_seqlens_q.data) queries = part_of(args, query_bounds(args), sequence, reports && threadIdx.x == 0);
  const CacheFacts facts = cache_facts(args, queries, reports && threadIdx.x == 0);
  if (queries.broken || facts.broken || !has_pages(args, facts, reports)) return;
  for (i32 t = first; t < facts.new_keys; t += blocks) append_row(args, facts, t);
}
