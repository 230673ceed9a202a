// The forward kernel's tiles, and what of them a warp holds in accumulators.
#pragma once
#include "kernels/products.cuh"

namespace narrows {

constexpr int kRowTiles = kBlockQueries / kWarps / 16;                  // 16-row tiles of a warp
constexpr int kKeyTiles = kBlockKeys / 8, kValueTiles = kValueDim / 8;  // 8-column tiles
constexpr int kWarpRows = 16 * kRowTiles;
constexpr int kHeadBytes = kHeadDim * kElementBytes, kValueBytes = kValueDim * kElementBytes;  // of a row

constexpr SmemTile kQueryTile{kBlockQueries, kHeadBytes}, kKeyTile{kBlockKeys, kHeadBytes},
    kValueTile{kBlockKeys, kValueBytes};

using Scores = float[kRowTiles][kKeyTiles][4];
using Outputs = float[kRowTiles][kValueTiles][4];

}  // namespace narrows
