// The backward kernels' tiles, and what of them a warp holds. Scores are transposed there: a row is a key, a column a query, so
// that P^T and dS^T are operands of dV += P^T dO and dK += dS^T Q as they leave the tensor cores.
#pragma once
#include "kernels/products.cuh"
#include "kernels/sequences.cuh"
#include "shared/backward_args.h"

namespace narrows {

constexpr int kHeadBytes = kHeadDim * kElementBytes, kValueBytes = kValueDim * kElementBytes;  // of a row
constexpr SmemTile kKeyTile{kBlockKeys, kHeadBytes}, kValueTile{kBlockKeys, kValueBytes};
constexpr SmemTile kQueryTile{kBlockQueries, kHeadBytes}, kOutputTile{kBlockQueries, kValueBytes};  // Q, dO
constexpr SmemTile kScoreTile{kBlockKeys, max_of(kBlockQueries* kElementBytes, 64)};                // P^T, dS^T

// kColumnWarps warps share some keys. Each makes the scores of a part of the queries, and sums a part of the columns of dK and
// dV; where there is more than one, they exchange scores in shared memory.
constexpr bool kExchanges = kColumnWarps > 1;
constexpr int kKeyWarps = kWarps / kColumnWarps, kRowTiles = kBlockKeys / kKeyWarps / 16;  // 16-key tiles of a warp
constexpr int kScoreWarps =
    min_of(kColumnWarps, kBlockQueries / 16);  // of the warps that share keys, those that make scores
constexpr int kWarpQueries = kBlockQueries / kScoreWarps, kQueryTiles = kWarpQueries / 8;
constexpr int kRows = 2 * kRowTiles;                    // of keys that a lane holds a quarter of
using HeadPart = ColumnPart<kQueryTile, kColumnWarps>;  // of rows of Q and dK
using ValuePart = ColumnPart<kOutputTile, kColumnWarps>;

using Scores = float[kRowTiles][kQueryTiles][4];
using KeySums = float[kRowTiles][HeadPart::tiles][4];
using ValueSums = float[kRowTiles][ValuePart::tiles][4];

// dQ of a step is cut among the warps another way: rows, columns, and columns again where a warp cannot hold its part at once.
constexpr int kSumRowTiles = kBlockQueries >= 64 && kHeadBytes >= 128 ? 2 : 1;
constexpr int kSumRowWarps = kBlockQueries / 16 / kSumRowTiles, kSumColumnWarps = max_of(kWarps / kSumRowWarps, 1);
constexpr int kSumColumns = ColumnPart<kKeyTile, kSumColumnWarps>::columns;
constexpr int kSumPasses = kSumRowTiles * kSumColumns > 128 ? ceil_div(kSumRowTiles* kSumColumns, 128) : 1;
using SumPart = ColumnPart<kKeyTile, kSumColumnWarps * kSumPasses>;
using QuerySums = float[kSumRowTiles][SumPart::tiles][4];

// Where a lane's scores are.
struct LanePlace {
  i32 lane = static_cast<i32>(threadIdx.x % kWarp), warp = static_cast<i32>(threadIdx.x / kWarp);

  i32 column_warp() const { return warp % kColumnWarps; }
  i32 first_key() const { return warp / kColumnWarps * 16 * kRowTiles; }
  i32 first_query() const { return column_warp() * kWarpQueries; }
  i32 key(int r) const { return first_key() + r / 2 * 16 + r % 2 * 8 + lane / 4; }  // r in [0, kRows)
  i32 query(int j, int e) const { return first_query() + 8 * j + lane % 4 * 2 + e; }
};

// dQ in scratch: accumulators of 16 rows and 8 columns lie together, in the order in which a warp adds to them.
constexpr int kSumsOfBlock = kBlockQueries * kHeadDim;
constexpr int sum_place(int row_tile, int column_tile, int lane, int i) {
  const int tile = (row_tile * (kHeadDim / 8) + column_tile) * 128;
  return tile + (kVectorSums ? lane * 4 + i : i * kWarp + lane);
}

}  // namespace narrows
