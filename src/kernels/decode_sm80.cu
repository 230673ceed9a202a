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
      load_keys(k, rows, part, args.head_dim, args.k.strides[3]);
    else if (has_next)
      load_keys(k, next_rows, 0, args.head_dim, args.k.strides[3]);
  }
  void load_v(const DecodeArgs& args, int part) {
    if (part < kValueParts)
      load_values(v, rows, part, args.value_dim, args.v.strides[3]);
    else if (has_next)
      load_values(v, next_rows, 0, args.value_dim, args.v.strides[3]);
  }
};

inline void multiply_keys(const Block& block, const QueryPieces* kept, Stream& stream, Scores& s) {
  PartialScores sums = {};
#pragma unroll
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

// A warp's share of tiles [begin, end): those whose number, counted from key 0, is the warp's in turn.
inline void attend(const Block& block, i32 begin, i32 end, Softmax& softmax, Outputs& o) {
  const i32 warp = __shfl_sync(~0u, static_cast<i32>(threadIdx.x) / kWarp, 0);
  i32 tile = begin + (warp - begin % kWarps + kWarps) % kWarps;
  if (tile >= end) return;
  const DecodeArgs& args = block.args;
  KeyRows keys(block);
  Stream stream;
  stream.rows = keys.row(tile);
  stream.load_k(args, 0);
  stream.load_v(args, 0);
  stream.has_next = tile + kWarps < end;
  stream.next_rows = stream.has_next ? keys.row(tile + kWarps) : stream.rows;
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
    if (stream.has_next) stream.next_rows = keys.row(tile + 2 * kWarps);
  }
  if (__any_sync(~0u, keys.is_broken()))
#pragma unroll
    for (int r = 0; r < kRows; ++r) softmax.sum[r] = as_float(0x7fffffffu);
}

// A warp's part of units [begin, end) of the row.
inline void attend_units(const Block& block, i32 begin, i32 end) {
  const Facts& facts = block.facts;
  const i32 first = first_tile(block.args, facts.hull.begin), piece = facts.share.row.cut.tiles_of_piece;
  const i32 from = max_of(first + begin * piece, facts.hull.begin / kTileKeys);
  Softmax softmax;
  Outputs o = {};
  if (facts.hull.begin < facts.hull.end)
    attend(block, from, min_of(first + end * piece, ceil_div(facts.hull.end, kTileKeys)), softmax, o);
  __syncthreads();  // all have left the parts before
  keep_part(block, softmax, o);
  __syncthreads();
}

// Whether all blocks that have a part of the row have stored it, this one among them.
inline bool is_last(const Block& block) {
  __shared__ bool last;
  __syncthreads();
  const u32 most = static_cast<u32>(block.facts.owners.count - 1);
  if (threadIdx.x == 0) last = count_up(block.args.tickets + block.facts.owners.first, most) == most;
  __syncthreads();
  return last;
}

// Where the parts of the row are: of each block that has some of it or, with fixed splits, of each split, whoever has it.
inline PartSlots slots_of(const Block& block) {
  const PartSlots& owners = block.facts.owners;
  if (block.args.fixed_split == 0) return owners;
  const i64 first = owners.first * block.args.most_parts;
  return {block.facts.share.row.cut.pieces, first, first, 1};
}

inline void work_on(const Block& block) {
  const Facts& facts = block.facts;
  const bool fixed = block.args.fixed_split != 0;
  for (i32 unit = facts.share.begin; unit < facts.share.end; unit = fixed ? unit + 1 : facts.share.end) {
    attend_units(block, unit, fixed ? unit + 1 : facts.share.end);
    const i64 part = fixed ? unit : i64{blockIdx.x} - facts.owners.first / 2;
    const bool done = facts.whole && !fixed;
    const i64 slot = done ? 0 : slots_of(block).slot(static_cast<i32>(part));
    each_row(block, [&](int r) {
      const JoinedRow joined = join_warps(block, r);
      if (done)
        store_row(block, r, joined);
      else
        store_part(block, slot, r, joined);
    });
  }
  if ((facts.whole && !fixed) || !is_last(block)) return;
  const i32 offset = fixed ? first_tile(block.args, facts.hull.begin) / block.args.fixed_split % kWarp : 0;
  each_row(block, [&](int r) { store_row(block, r, join_slots(block, slots_of(block), offset, r)); });
}

}  // namespace narrows

extern "C" __global__ void __launch_bounds__(narrows::kThreads, narrows::kBlocksOfMultiprocessor)
    decode_sm80(const __grid_constant__ narrows::DecodeArgs args) {
  using namespace narrows;
  extern __shared__ __align__(128) char memory[];
  __shared__ Facts facts;
  __shared__ LineState state;
  __shared__ RowSum sums[kWarps * kBlockQueries];
  const Block block{args, facts, memory, reinterpret_cast<float*>(memory + kBlockQueries * kQueryStride), sums};
  Line line(args, state);
  if (threadIdx.x < kWarp) line.make();
  for (;;) {
    __syncthreads();  // all have left the row before
    if (threadIdx.x < kWarp) {
      const Share share = line.next();
      if (share.row.sequence < 0)
        facts.share = share;
      else
        gather_facts(block, state, share);
    }
    __syncthreads();
    if (facts.share.row.sequence < 0) return;
    load_queries(block);
    __syncthreads();
    work_on(block);
  }
}
