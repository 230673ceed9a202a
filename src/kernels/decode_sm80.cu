// O = softmax(scale * Q K^T) V and its LSE for few query rows, with keys in a cache, in pages or in tensors, on every GPU since
// Ampere: K and V go from memory into the operands of mma.sync, without shared memory and without a barrier in the loop over keys.
//
// A thread block takes a stretch of the line of all work (decode_rows.cuh). Of one row's tiles of 16 keys its warps take turns;
// they meet when the stretch or the row ends. A tile's K is asked for when the one before it has been multiplied, its V likewise.
#include "kernels/decode_results.cuh"
#include "kernels/decode_scores.cuh"

namespace narrows {

// A tile of which some parts of K and V are in registers, and the next.
struct Stream {
  KeyPieces k;
  ValuePieces v;
  const char *rows, *next_rows;
  bool has_next;

  void load_k(const DecodeArgs& args, int part) {
    if (part < kKeyParts)
      load_keys(k, rows, part, args.head_dim, args.k.strides[3], true);
    else
      load_keys(k, next_rows, 0, args.head_dim, args.k.strides[3], has_next);
  }
  void load_v(const DecodeArgs& args, int part) {
    if (part < kValueParts)
      load_values(v, rows, part, args.value_dim, args.v.strides[3], true);
    else
      load_values(v, next_rows, 0, args.value_dim, args.v.strides[3], has_next);
  }
};

inline void multiply_keys(const Block& block, const QueryPieces* kept, Stream& stream, Scores& s) {
  PartialScores sums = {};
#pragma unroll(kKeyParts > 4 ? 1 : kKeyParts)  // of wide rows: addresses of all parts would not fit into registers
  for (int part = 0; part < kKeyParts; ++part) {
#pragma unroll
    for (int i = 0; i < kKeyPart; ++i) {
      if constexpr (kKeepsQueries) {
        add_scores(sums, kept[i], stream.k, i);
      } else {
        QueryPieces q;
        read_queries(block, part * kKeyPart + i, q);
        add_scores(sums, q, stream.k, i);
      }
    }
    stream.load_k(block.args, part + 1);
  }
#pragma unroll
  for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][t][i] = sums[0][t][i] + sums[1][t][i];
}

inline void multiply_values(const DecodeArgs& args, const Scores& p, Stream& stream, Outputs& o) {
#pragma unroll
  for (int part = 0; part < kValueParts; ++part) {
    add_values(o, p, stream.v, part);
    stream.load_v(args, part + 1);
  }
}

// Whether a maximum of the warp has moved.
inline bool rescales(const float (&factor)[kRows]) {
  bool moved = false;
#pragma unroll
  for (int r = 0; r < kRows; ++r) moved |= factor[r] != 1.f;
  return __any_sync(~0u, moved);
}

// One tile.
inline void step(const Block& block, const QueryPieces* kept, const RuledRows& ruled, const DropoutRule& dropout,
                 i32 tile, Stream& stream, Softmax& softmax, Outputs& o) {
  const Keys& common = block.facts.common;
  const i32 first = tile * kTileKeys;
  const ScoreTile given(block, ruled, tile);
  Scores s;
  multiply_keys(block, kept, stream, s);
  if constexpr (kNatural) make_logits(s, block, ruled, given, tile);
  if (first < common.begin || common.end < first + kTileKeys) hide_unseen(s, block.facts, tile);
  if constexpr (kMask) hide_masked(s, given, tile);
  float factor[kRows], subtrahend[kRows];
  raise_reference(softmax, s, factor, subtrahend, block.args.units);
  if (rescales(factor)) scale_rows(o, factor);
  weigh(softmax, s, subtrahend, block.args.units);
  if constexpr (kDropout) drop(s, dropout, block, ruled, tile);
  multiply_values(block.args, s, stream, o);
}

// The loads of the warp's first tile, before anything that waits.
inline Stream begin_stream(const Block& block, KeyRows& keys, i32 tile) {
  const i32 end = block.facts.end_tile;
  Stream stream;
  stream.rows = keys.row(min_of(tile, end - 1));
  load_keys(stream.k, stream.rows, 0, block.args.head_dim, block.args.k.strides[3], tile < end);
  load_values(stream.v, stream.rows, 0, block.args.value_dim, block.args.v.strides[3], tile < end);
  stream.has_next = tile + kWarps < end;
  stream.next_rows = keys.row(min_of(tile + kWarps, end - 1));
  return stream;
}

// Of the block's tiles the warp takes those whose number, counted from key 0, is its in turn.
inline void attend(const Block& block, Softmax& softmax, Outputs& o) {
  const i32 warp = __shfl_sync(~0u, static_cast<i32>(threadIdx.x) / kWarp, 0);
  const i32 begin = block.facts.first_tile, end = block.facts.end_tile;
  const DecodeArgs& args = block.args;
  i32 tile = begin + (warp - begin) % kWarps;
  if (tile < begin) tile += kWarps;
  KeyRows keys(block);
  QueryLoad query(block);  // before the keys: they keep memory busy for long
  Stream stream = begin_stream(block, keys, tile);
  query.finish();
  __syncthreads();
  QueryPieces kept[kKeepsQueries ? kKeySteps : 1];
  if constexpr (kKeepsQueries)
#pragma unroll
    for (int i = 0; i < kKeySteps; ++i) read_queries(block, i, kept[i]);
  const RuledRows ruled(block);
  const DropoutRule dropout = kDropout ? dropout_rule(args) : DropoutRule{};
#pragma unroll 1
  for (; tile < end; tile += kWarps) {
    step(block, kept, ruled, dropout, tile, stream, softmax, o);
    stream.rows = stream.next_rows;
    stream.has_next = tile + 2 * kWarps < end;
    stream.next_rows = keys.row(min_of(tile + 2 * kWarps, end - 1));
  }
  if (__any_sync(~0u, keys.is_broken()))
#pragma unroll
    for (int r = 0; r < kRows; ++r) softmax.sum[r] = as_float(0x7fffffffu);
}

inline void work_on(const Block& block) {
  Softmax softmax;
  Outputs o = {};
  if (block.facts.first_tile < block.facts.end_tile) attend(block, softmax, o);
  keep_part(block, softmax, o);
  __syncthreads();
  weigh_warps(block);
  store_block(block);
  if (block.facts.slots.count > 1 && is_last(block)) join_blocks(block);
}

}  // namespace narrows

extern "C" __global__ void __launch_bounds__(narrows::kThreads, narrows::kBlocksOfMultiprocessor)
    decode_sm80(const __grid_constant__ narrows::DecodeArgs args) {
  using namespace narrows;
  extern __shared__ __align__(128) char memory[];
  __shared__ Facts facts;
  __shared__ LineState state;
  __shared__ RowSum sums[(kWarps + 1) * kBlockQueries];
  float* const outputs = reinterpret_cast<float*>(memory + kBlockQueries * kQueryStride);
  const Block block{args, facts, memory, outputs, sums};
  Line line(args, state, reinterpret_cast<LineSequence*>(outputs + kWarps * kBlockQueries * kOutputStride));
  line.begin();
  for (;;) {
    line.next(facts, [&] { gather_facts(args, facts, state.plain); });
    if (facts.kv_head < 0) return;
    if (facts.begin < facts.end) work_on(block);
  }
}
