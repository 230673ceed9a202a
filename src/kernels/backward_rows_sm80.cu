// What the backward pass must know of each query row: its LSE as the exponent takes it, and delta = rowsum(dO * O) - dLSE; and
// the blocks' parts of dsink = sum exp(sink - LSE) (dLSE - rowsum(dO * O)). The sums of dQ begin at 0 here.
//
// A thread block takes a block of query rows of one head, those of the call's first heads at last, so that the next kernel finds
// what it begins with in L2: 8 lanes a row of O and dO, then a thread a row.
#include "kernels/copy_tile.cuh"
#include "kernels/sequences.cuh"
#include "shared/backward_args.h"

namespace narrows {

constexpr int kLanesOfRow = 8, kRowsAtOnce = kThreads / kLanesOfRow;
constexpr int kRowUnits = ceil_div(kValueDim * kElementBytes, kLanesOfRow* kUnitBytes);  // of a lane
// Rows of a thread that are loaded together, all before the first is used: a block lives for about one such round, so that what
// it has on its way is what memory is asked for at once. 16 loads of 16 bytes.
constexpr int kRowsTogether = clamp_to(8 / kRowUnits, 1, ceil_div(kBlockQueries, kRowsAtOnce));
static_assert(kBlockQueries <= kThreads, "a thread a row");

// A lane's part of some rows of O or dO.
struct RowParts {
  u32 words[kRowsTogether][kRowUnits][4] = {};

  // Rows `first` and each kRowsAtOnce-th behind it, of those that exist.
  RowParts(const GlobalRows& from, int first, i32 rows, int lane) {
#pragma unroll
    for (int n = 0; n < kRowsTogether; ++n)
#pragma unroll
      for (int unit = 0; unit < kRowUnits; ++unit) {
        const int row = first + n * kRowsAtOnce, column = (unit * kLanesOfRow + lane) * (kUnitBytes / kElementBytes);
        load_stream_if(row < rows && column < from.columns, from.first + row * from.row_stride + column * kElementBytes,
                       words[n][unit]);
      }
  }
};

inline float dot_of(const u32 (&a)[kRowUnits][4], const u32 (&b)[kRowUnits][4]) {
  float sum = 0.f;
#pragma unroll
  for (int unit = 0; unit < kRowUnits; ++unit)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum += dot_of_word(a[unit][i], b[unit][i]);
  return sum;
}

inline float sum_of_lanes(float x) {
#pragma unroll
  for (int mask = 1; mask < kLanesOfRow; mask *= 2) x += lane_xor(x, mask);
  return x;
}

// rowsum(dO * O) of each row of the block to shared memory. clear: called while the first rows are on their way.
template <class Clear>
inline void sum_rows(float* sums, const GlobalRows& o, const GlobalRows& dout, i32 rows, const Clear& clear) {
  const int lane = static_cast<int>(threadIdx.x) % kLanesOfRow, first = static_cast<int>(threadIdx.x) / kLanesOfRow;
  if constexpr (kCopyBytes == kUnitBytes) {
#pragma unroll 1
    for (int r = first; r < kBlockQueries; r += kRowsTogether * kRowsAtOnce) {
      const RowParts a(o, r, rows, lane), b(dout, r, rows, lane);
      if (r == first) clear();
#pragma unroll
      for (int n = 0; n < kRowsTogether; ++n) {
        const float sum = sum_of_lanes(dot_of(a.words[n], b.words[n]));
        if (lane == 0 && r + n * kRowsAtOnce < kBlockQueries) sums[r + n * kRowsAtOnce] = sum;
      }
    }
  } else {
    clear();
    for (int r = first; r < kBlockQueries; r += kRowsAtOnce) {
      float sum = 0.f;
      for (int c = lane; r < rows && c < o.columns; c += kLanesOfRow)
        sum += load_element(o.first + r * o.row_stride + c * o.column_stride, kElement) *
               load_element(dout.first + r * dout.row_stride + c * dout.column_stride, kElement);
      sum = sum_of_lanes(sum);
      if (lane == 0) sums[r] = sum;
    }
  }
}

// Taking turns in family sm90, who is the first to add to a block's sums stores instead; nobody does where no row sees a key.
inline bool adds_to_zero(const BackwardArgs& args, const QueryBlock& block) {
  if constexpr (!kDeterministic || !kFactsApart) return true;
  const Range rows{block.first_row, min_of(block.first_row + kBlockQueries, block.queries)};
  const Range keys = key_range(args.visibility, rows, block.shift, block.keys);
  return keys.begin >= keys.end;
}
// The block's sums of dQ.
inline void clear_sums(float* sums) {
  constexpr int fours = kBlockQueries * kHeadDim / 4;
#pragma unroll 8
  for (int index = static_cast<int>(threadIdx.x); index < fours; index += kThreads)
    store_global4(sums + 4 * index, {0.f, 0.f, 0.f, 0.f});
}

// LSE and dLSE of a row of the block's head.
struct RowNumbers {
  const char* first;
  i64 row_stride;

  RowNumbers(const TensorArg& tensor, const QueryBlock& block)
      : first(tensor.data + block.sequence * tensor.strides[0] + block.head * tensor.strides[1] +
              i64{block.first_query + block.first_row} * tensor.strides[2]),
        row_stride(tensor.strides[2]) {}
  float operator[](i64 row) const { return *reinterpret_cast<const float*>(first + row * row_stride); }
};

// As RowFacts has it.
inline float reference_of_row(const BackwardArgs& args, float lse) {
  if (lse == -kInfinity<float>) return kInfinity<float>;
  if constexpr (kNatural) return lse;
  if (!is_far(lse)) return ScalarMath::multiply(lse, static_cast<float>(kLog2e));
  *args.far_rows = 1;
  return 0.f;
}

// facts: of the block.
inline void store_facts(RowFacts* facts, int row, const RowFacts& own) {
  if constexpr (kFactsApart) {
    float* const references = &facts->reference;
    references[fact_place(row)] = own.reference;
    references[kBlockQueries + fact_place(row)] = own.delta;
  } else {
    facts[row] = own;
  }
}

// All rows of the block, a thread a row. Returns the thread's part of dsink.
inline float make_rows(const BackwardArgs& args, const QueryBlock& block, i64 number, float sink) {
  __shared__ float deltas[kBlockQueries];
  const i32 row = block.first_query + block.first_row, rows = block.queries - block.first_row;
  const GlobalRows o = rows_of(args.o, block.sequence, row, block.head, args.value_dim);
  const GlobalRows dout = rows_of(args.dout, block.sequence, row, block.head, args.value_dim);
  const RowNumbers lse(args.lse, block), dlse(args.dlse, block);
  const int r = static_cast<int>(threadIdx.x);
  const bool exists = r < min_of(rows, kBlockQueries);
  const float own = exists ? lse[r] : -kInfinity<float>, own_dlse = exists && args.dlse.data ? dlse[r] : 0.f;
  sum_rows(deltas, o, dout, rows, [&] {
    if (args.query_sums != nullptr && adds_to_zero(args, block))
      clear_sums(args.query_sums + number * kBlockQueries * kHeadDim);
  });
  __syncthreads();
  if (r >= kBlockQueries) return 0.f;
  const float delta = deltas[r] - own_dlse;
  const Keys seen = exists ? seen_keys(args, block, block.first_row + r) : Keys{0, 0};
  const bool counts = seen.begin < seen.end && own != -kInfinity<float>;
  // Of a row that sees no key nothing counts, whatever it holds.
  store_facts(args.rows + number * kBlockQueries, r,
              counts ? RowFacts{reference_of_row(args, own), delta} : RowFacts{kInfinity<float>, 0.f});
  // A sink is in its row's LSE, so that its weight is at most 1.
  if (own == -kInfinity<float> || sink == -kInfinity<float>) return 0.f;
  return -exp2_approx(min_or_nan((sink - own) * static_cast<float>(kLog2e), 0.f)) * delta;
}

// One number of all threads' parts, always added in the same order.
inline float block_sum(float part) {
  __shared__ float parts[kThreads / kWarp];
#pragma unroll
  for (int mask = 1; mask < kWarp; mask *= 2) part += lane_xor(part, mask);
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = part;
  __syncthreads();
  float sum = 0.f;
#pragma unroll
  for (float one : parts) sum += one;
  return sum;
}

}  // namespace narrows

extern "C" __global__ void __launch_bounds__(narrows::kThreads)
    backward_rows_sm80(const __grid_constant__ narrows::BackwardArgs args) {
  using namespace narrows;
  let_next_begin();
  const QueryBlock block = find_query_block(args, args.query_blocks, 1, gridDim.x - 1 - blockIdx.x);
  const bool varlen = is_varlen(args.cu_seqlens_q);
  const BlockPlace place = block_place(varlen, block.sequence, block.head, args.heads, block.first_query,
                                       block.first_row / kBlockQueries, kBlockQueries);
  float sink = -kInfinity<float>;
  if (args.dsinks.data) sink = load_element(args.sinks.data + block.head * args.sinks.strides[0], args.sinks.element);
  float dsink = 0.f;
  if (block.rows > 0) dsink = make_rows(args, block, place.number(args.query_blocks), sink);
  if (block.broken) dsink = as_float(0x7fffffffu);
  if (args.sink_sums == nullptr) return;
  dsink = block_sum(dsink);
  const i64 blocks = varlen ? args.query_blocks : i64{args.batch} * args.query_blocks;
  const i64 number = varlen ? place.block : i64{block.sequence} * args.query_blocks + place.block;
  if (threadIdx.x == 0) args.sink_sums[block.head * blocks + number] = dsink;
}
