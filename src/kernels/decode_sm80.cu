// O = softmax(scale * Q K^T) V and its LSE for few query rows, with keys in a cache, in pages or in tensors, on every GPU since
// Ampere: K and V go from memory into the operands of mma.sync, without shared memory and without a barrier in the loop over keys.
//
// A thread block takes a stretch of the line of all work (decode_rows.cuh). Of one row's tiles of 16 keys its warps take turns;
// they meet when the stretch or the row ends. A tile's K is asked for when the one before it has been multiplied, its V likewise.
#include "kernels/decode_join.cuh"
#include "kernels/decode_plain.cuh"
#include "kernels/decode_scores.cuh"

namespace narrows {

// Whether the next tile's rows are looked for before the products wait for this tile's, which takes registers.
constexpr bool kFindsEarly = !kFewRegisters && kKeyParts == 1 && kValueParts == 1;

// A warp's tile, of which some parts of K and V are in registers, and its next.
struct Stream {
  i32 tile;
  KeyPieces k;
  ValuePieces v;
  const char *rows, *next_rows;
  bool has_next;

  // Part `part` of the tile; behind the last one, the first of the next tile, whose rows are `places` where kFindsEarly.
  void load_k(const DecodeArgs& args, int part, KeyPlaces& places) {
    const bool behind = part == kKeyParts;
    if (!behind || !kFindsEarly) find_keys(places, behind ? next_rows : rows);
    load_keys(k, places, behind ? 0 : part, args.head_dim, args.k.strides[3], behind ? has_next : true);
  }
  void load_v(const DecodeArgs& args, int part, ValuePlaces& places) {
    const bool behind = part == kValueParts;
    if (!behind || !kFindsEarly) find_values(places, behind ? next_rows : rows);
    load_values(v, places, behind ? 0 : part, args.value_dim, args.v.strides[3], behind ? has_next : true);
  }
};

inline void multiply_keys(const Block& block, const Queries& kept, Stream& stream, Scores& s) {
  PartialScores sums = {};
  KeyPlaces places;
  if constexpr (kFindsEarly) find_keys(places, stream.next_rows);
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
    stream.load_k(block.args, part + 1, places);
  }
#pragma unroll
  for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][t][i] = sums[0][t][i] + sums[1][t][i];
}

inline void multiply_values(const DecodeArgs& args, const Scores& p, Stream& stream, Outputs& o) {
  ValuePlaces places;
  if constexpr (kFindsEarly) find_values(places, stream.next_rows);
#pragma unroll
  for (int part = 0; part < kValueParts; ++part) {
    add_values(o, p, stream.v, part);
    stream.load_v(args, part + 1, places);
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
inline void step(const Block& block, const Queries& kept, const RuledRows& ruled, const DropoutRule& dropout, i32 tile,
                 Stream& stream, Softmax& softmax, Outputs& o) {
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

// Packed rows by way of shared memory.
inline void bring_queries(const Block& block, Queries& kept) {
  load_queries(block);
  __syncthreads();
  if constexpr (kKeepsQueries)
#pragma unroll
    for (int i = 0; i < kKeySteps; ++i) read_queries(block, i, kept[i]);
}

// Where the warp's first loads go; of a warp without a tile to the block's last.
struct Start {
  QueryPlaces queries;
  KeyPlaces keys;
  ValuePlaces values;

  Start(const Block& block, KeyRows& rows, Stream& stream, bool early) : queries(block) {
    stream.tile = first_tile_of_warp(block.facts);
    look(block, rows, stream, early);
  }
  void look(const Block& block, KeyRows& rows, Stream& stream, bool early) {
    stream.rows = rows.row(min_of(stream.tile, block.facts.end_tile - 1), early);
    find_keys(keys, stream.rows);
    find_values(values, stream.rows);
  }

  // Under no condition: what loads left in registers would be moved to others, which waits for it. Queries before the keys, which keep
  // memory busy for long.
  void load(const DecodeArgs& args, Stream& stream, Queries& kept) const {
    if constexpr (kAsksQueries) queries.ask(args, kept);
    load_keys(stream.k, keys, 0, args.head_dim, args.k.strides[3], true);
    load_values(stream.v, values, 0, args.value_dim, args.v.strides[3], true);
  }
};

// False: by lengths that were others when the kernel ahead had ended.
inline bool attend(const Block& block, Ahead& ahead, Softmax& softmax, Outputs& o) {
  const DecodeArgs& args = block.args;
  KeyRows keys(block);
  Queries kept;
  Stream stream;
  Start start(block, keys, stream, ahead.waits);
  const bool early = ahead.waits;
  i32 found = 0;
  if (early) {
    if (stream.tile < block.facts.end_tile) fetch_rows(args, stream.rows);
    found = ahead.look_again(args);
    if (args.table != nullptr) start.look(block, keys, stream, false);
  }
  start.load(args, stream, kept);
  if (early && !ahead.holds(args, found)) return false;
  if constexpr (!kAsksQueries) bring_queries(block, kept);
  const RuledRows ruled(block);
  const DropoutRule dropout = kDropout ? dropout_rule(args) : DropoutRule{};
  const i32 end = block.facts.end_tile;
  stream.has_next = stream.tile + kWarps < end;
  stream.next_rows = keys.row(min_of(stream.tile + kWarps, end - 1));
#pragma unroll 1
  for (; stream.tile < end; stream.tile += kWarps) {
    step(block, kept, ruled, dropout, stream.tile, stream, softmax, o);
    stream.rows = stream.next_rows;
    stream.has_next = stream.tile + 2 * kWarps < end;
    stream.next_rows = keys.row(min_of(stream.tile + 2 * kWarps, end - 1));
  }
  if (__any_sync(~0u, keys.is_broken()))
#pragma unroll
    for (int r = 0; r < kRows; ++r) softmax.sum[r] = as_float(0x7fffffffu);
  return true;
}

// False: nothing was done, as attend says.
inline bool work_on(const Block& block, Ahead& ahead) {
  Softmax softmax;
  Outputs o = {};
  if (block.facts.first_tile < block.facts.end_tile && !attend(block, ahead, softmax, o)) return false;
  let_next_begin();
  keep_part(block, softmax, o);
  __syncthreads();
  store_block(block);
  if (block.facts.slots.count > 1 && is_last(block)) join_blocks(block);
  return true;
}

}  // namespace narrows

extern "C" __global__ void __launch_bounds__(narrows::kThreads, narrows::kBlocksOfMultiprocessor)
    decode_sm80(const __grid_constant__ narrows::DecodeArgs args) {
  using namespace narrows;
  char* const memory = dynamic_shared();
  __shared__ Facts line_facts;
  __shared__ LineState state;
  __shared__ RowSum sums[kWarps * kBlockQueries];
  float* const outputs = reinterpret_cast<float*>(memory + kBlockQueries * kQueryStride);
  auto* const own = reinterpret_cast<LineSequence*>(outputs + kWarps * kBlockQueries * kOutputStride);
  Line line(args, state, own);
  PlainWork& work = plain_work(own);
  // Where kernels overlap, all up to the first loads comes before the wait for the one ahead.
  const bool is_plain = args.plain_filled >= 0;
  Ahead ahead{kOverlaps && is_plain && args.batch <= kWarp, 0};
  if (!ahead.waits) wait_for_previous();
  Way way = Way::unknown;
  for (;;) {
    if (way == Way::unknown) {
      way = is_plain ? begin_plain(args, work, ahead) : Way::line;
      if (ahead.waits && !has_tiles(way, work) && !ahead.holds(args, ahead.look_again(args))) {
        way = Way::unknown;
        continue;
      }
      if (way == Way::nothing) return;
      if (way == Way::line) line.begin();
    }
    const Block block{args, way == Way::line ? line_facts : work.facts, memory, outputs, sums};
    if (way == Way::line) {
      line.next(line_facts, [&](bool other_rows) {
        if (other_rows) gather_rows(args, line_facts);
        if (threadIdx.x == 0) gather_tiles(args, line_facts);
      });
      if (line_facts.kv_head < 0) return;
    }
    if (block.facts.begin < block.facts.end && !work_on(block, ahead)) {
      way = Way::unknown;
      continue;
    }
    if (way == Way::piece || (way == Way::stretch && !next_stretch(args, work))) return;
    __syncthreads();
  }
}
