// The tile kernels of AMX for machines that have none: the same text, with the tile registers as arrays.
#define NARROWS_VECTOR_BYTES 64
#include "cpu/tile_vectors.inl.hpp"

#include "cpu/tile_generic.inl.hpp"

#include "tests/cpu/tile_bf16_generic.hpp"

namespace narrows::cpu {
namespace {

struct Isa : GenericBf16 {
  static constexpr const char* kName = "registers";
  static constexpr int kRows = 32, kDepth = 32;
};

/// As the instructions do it: a tile without rows is not there, rows beyond a tile's are neither read nor written, and a
/// product adds the even and the odd elements of 32 apart before it adds them to the sum.
class TileRegisters {
 public:
  explicit TileRegisters(int count) : rows_{count < kTile ? count : kTile, count < kTile ? 0 : count - kTile} {}

  template <int Row, int Column> void clear_sum() { sum<Row, Column>() = {}; }
  template <int Row, int Column> void load_sum(const float* p, i64 stride) { load(sum<Row, Column>(), p, stride); }
  template <int Row, int Column> void store_sum(float* p, i64 stride) {
    const Tile& tile = sum<Row, Column>();
    for (int row = 0; row < tile.rows; ++row)
      __builtin_memcpy(reinterpret_cast<Packed*>(p) + row * stride, tile.bytes[row], kRowBytes);
  }
  template <int Row> void load_left(const Packed* p, i64 stride) {
    left_[Row].rows = existing(rows_[Row]);
    load(left_[Row], p, stride);
  }
  template <int Column> void load_right(const Packed* p, i64 stride) { load(right_[Column], p, stride); }

  template <int Row, int Column> void dot() {
    Tile& out = sum<Row, Column>();
    for (int row = 0; row < out.rows; ++row)
      for (int column = 0; column < kTile; ++column) {
        float even = 0, odd = 0;
        for (int pair = 0; pair < kTile; ++pair) {
          even += element(left_[Row], row, 2 * pair) * element(right_[Column], pair, 2 * column);
          odd += element(left_[Row], row, 2 * pair + 1) * element(right_[Column], pair, 2 * column + 1);
        }
        float value;
        Packed* const place = out.bytes[row] + column * i64{sizeof value};
        __builtin_memcpy(&value, place, sizeof value);
        value += even + odd;
        __builtin_memcpy(place, &value, sizeof value);
      }
  }

 private:
  static constexpr int kTile = 16, kRowBytes = 64;
  struct Tile {
    int rows = kTile;
    Packed bytes[kTile][kRowBytes] = {};
  };

  static int existing(int rows) {
    if (rows == 0) __builtin_trap();
    return rows;
  }
  template <int Row, int Column> Tile& sum() {
    sums_[Row][Column].rows = existing(rows_[Row]);
    return sums_[Row][Column];
  }
  static void load(Tile& tile, const void* p, i64 stride) {
    for (int row = 0; row < tile.rows; ++row)
      __builtin_memcpy(tile.bytes[row], static_cast<const Packed*>(p) + row * stride, kRowBytes);
  }
  static float element(const Tile& tile, int row, int x) {
    unsigned short value;
    __builtin_memcpy(&value, tile.bytes[row] + x * i64{sizeof value}, sizeof value);
    return bfloat_to_float(value);
  }

  int rows_[2];
  Tile sums_[2][2], left_[2], right_[2];
};

}  // namespace
}  // namespace narrows::cpu

#include "cpu/tile_kernels_registers.inl.hpp"

namespace narrows::cpu {
extern const InstructionSet kTileKernelsRegistersWide;
constinit const InstructionSet kTileKernelsRegistersWide{kKernels<float>, {}};
}  // namespace narrows::cpu
