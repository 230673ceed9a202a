// Six chains of tile products, with both operands all eight tiles: one unit of latency 52 that takes 16 clocks for each
// never waits.
#include "cpu/peak_loops.hpp"

#include <immintrin.h>

namespace narrows::cpu {
namespace {

constexpr int kChains = 6, kRows = 16, kRowBytes = 64, kTiles = 8;

/// What LDTILECFG reads.
struct alignas(64) TileShapes {
  unsigned char palette = 1, start_row = 0, reserved[14] = {};
  unsigned short row_bytes[16] = {};
  unsigned char rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

struct alignas(64) Tile {
  unsigned words[kRows * kRowBytes / sizeof(unsigned)];
};

float run(long rounds) {
  TileShapes shapes;
  for (int tile = 0; tile < kTiles; ++tile) {
    shapes.row_bytes[tile] = kRowBytes;
    shapes.rows[tile] = kRows;
  }
  // bf16 pairs of 1/8: each round adds 32 products of 1/64 to every sum.
  Tile operand;
  for (unsigned& word : operand.words) word = 0x3E003E00;
  __asm__ volatile("" ::: "memory");  // g++'s intrinsics do not say that they read what was stored before
  _tile_loadconfig(&shapes);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_loadd(6, &operand, kRowBytes);
  _tile_loadd(7, &operand, kRowBytes);
  for (long round = 0; round < rounds; ++round) {
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(1, 6, 7);
    _tile_dpbf16ps(2, 6, 7);
    _tile_dpbf16ps(3, 6, 7);
    _tile_dpbf16ps(4, 6, 7);
    _tile_dpbf16ps(5, 6, 7);
  }
  alignas(64) float sums[kChains][kRows * kRowBytes / sizeof(float)];
  _tile_stored(0, sums[0], kRowBytes);
  _tile_stored(1, sums[1], kRowBytes);
  _tile_stored(2, sums[2], kRowBytes);
  _tile_stored(3, sums[3], kRowBytes);
  _tile_stored(4, sums[4], kRowBytes);
  _tile_stored(5, sums[5], kRowBytes);
  _tile_release();
  float total = 0;
  for (const auto& sum : sums) total += sum[0];
  return total;
}

}  // namespace

const PeakLoop kPeakLoopAmx{2.0 * kChains * kRows * kRows * (kRowBytes / 2), run};

}  // namespace narrows::cpu
