// What the backward pass must know of each query row: its LSE as the exponent takes it, and delta = rowsum(dO * O) - dLSE; and
// the blocks' parts of dsink = sum exp(sink - LSE) (dLSE - rowsum(dO * O)).
//
// A thread block takes a block of query rows of one head, 8 lanes a row.
#include "kernels/copy_tile.cuh"
#include "kernels/sequences.cuh"
#include "shared/backward_args.h"

namespace narrows {

constexpr int kLanesOfRow = 8, kRowsAtOnce = kThreads / kLanesOfRow;

// The lane's part of rowsum(dO * O): units of 16 bytes where rows are such units.
inline float products(const GlobalRows& o, const GlobalRows& dout, i64 row, int lane) {
  const char *const first = o.first + row * o.row_stride, *const second = dout.first + row * dout.row_stride;
  float sum = 0.f;
  if constexpr (kCopyBytes == 16) {
    constexpr int elements = 16 / kElementBytes, step = kLanesOfRow * elements;
#pragma unroll
    for (int c = 0; c < kValueDim; c += step) {
      const int column = c + lane * elements;
      if (column >= o.columns) break;
      const uint4 a = *reinterpret_cast<const uint4*>(first + column * kElementBytes);
      const uint4 b = *reinterpret_cast<const uint4*>(second + column * kElementBytes);
      const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) sum += dot_of_word(x[i], y[i]);
    }
  } else {
    for (int c = lane; c < o.columns; c += kLanesOfRow)
      sum +=
          load_element(first + c * o.column_stride, kElement) * load_element(second + c * dout.column_stride, kElement);
  }
  return sum;
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

// All rows of the block. Returns the thread's part of dsink.
inline float make_rows(const BackwardArgs& args, const QueryBlock& block, RowFacts* facts, float sink) {
  const int lane = static_cast<int>(threadIdx.x) % kLanesOfRow, first = static_cast<int>(threadIdx.x) / kLanesOfRow;
  const i32 row = block.first_query + block.first_row, rows = block.queries - block.first_row;
  const GlobalRows o = rows_of(args.o, block.sequence, row, block.head, args.value_dim);
  const GlobalRows dout = rows_of(args.dout, block.sequence, row, block.head, args.value_dim);
  const RowNumbers lse(args.lse, block), dlse(args.dlse, block);
  float dsink = 0.f;
#pragma unroll 2
  for (int r = first; r < kBlockQueries; r += kRowsAtOnce) {
    const bool exists = r < rows;
    float delta = exists ? products(o, dout, r, lane) : 0.f;
#pragma unroll
    for (int mask = 1; mask < kLanesOfRow; mask *= 2) delta += lane_xor(delta, mask);
    if (lane != 0) continue;
    const float own = exists ? lse[r] : -kInfinity<float>;
    if (exists && args.dlse.data) delta -= dlse[r];
    const Keys seen = exists ? seen_keys(args, block, block.first_row + r) : Keys{0, 0};
    const bool counts = seen.begin < seen.end && own != -kInfinity<float>;
    // Of a row that sees no key nothing counts, whatever it holds.
    store_facts(facts, r, counts ? RowFacts{reference_of_row(args, own), delta} : RowFacts{kInfinity<float>, 0.f});
    // A sink is in its row's LSE, so that its weight is at most 1.
    if (own != -kInfinity<float> && sink != -kInfinity<float>)
      dsink -= exp2_approx(min_or_nan((sink - own) * static_cast<float>(kLog2e), 0.f)) * delta;
  }
  return dsink;
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
  const QueryBlock block = find_query_block(args, args.query_blocks, 1, blockIdx.x);
  const bool varlen = is_varlen(args.cu_seqlens_q);
  const BlockPlace place = block_place(varlen, block.sequence, block.head, args.heads, block.first_query,
                                       block.first_row / kBlockQueries, kBlockQueries);
  float sink = -kInfinity<float>;
  if (args.dsinks.data) sink = load_element(args.sinks.data + block.head * args.sinks.strides[0], args.sinks.element);
  float dsink = 0.f;
  if (block.rows > 0) dsink = make_rows(args, block, args.rows + place.number(args.query_blocks) * kBlockQueries, sink);
  if (block.broken) dsink = as_float(0x7fffffffu);
  if (args.sink_sums == nullptr) return;
  dsink = block_sum(dsink);
  const i64 blocks = varlen ? args.query_blocks : i64{args.batch} * args.query_blocks;
  const i64 number = varlen ? place.block : i64{block.sequence} * args.query_blocks + place.block;
  if (threadIdx.x == 0) args.sink_sums[block.head * blocks + number] = dsink;
}
