// AMX: tile registers of bf16, and AVX512-BF16 between the products.
#define NARROWS_VECTOR_BYTES 64
#include "cpu/tile_vectors.inl.hpp"

#include "cpu/tile_isa_avx512.inl.hpp"

#include "cpu/tile_isa_avx512bf16.inl.hpp"

namespace narrows::cpu {
namespace {

struct Isa : Avx512Bf16 {
  static constexpr const char* kName = "amx";
  static constexpr int kRows = 32, kDepth = 32;
};

/// What LDTILECFG reads: tiles 0 to 3 are the sums, 4 and 5 the left operand, 6 and 7 the right one.
struct alignas(64) TileShapes {
  unsigned char palette = 1, start_row = 0, reserved[14] = {};
  unsigned short row_bytes[16] = {};
  unsigned char rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64);

/// For every count of rows. Constants: the compiler knows of 8 bytes that the intrinsic reads, and might leave out stores of
/// the rest.
struct ShapesOfCounts {
  TileShapes of[Isa::kRows + 1];

  constexpr ShapesOfCounts() : of{} {
    for (int count = 1; count <= Isa::kRows; ++count) {
      const int above = count < 16 ? count : 16, below = count - above;
      for (const int tile : {0, 1, 4}) shape(of[count], tile, above);
      for (const int tile : {2, 3, 5}) shape(of[count], tile, below);
      for (const int tile : {6, 7}) shape(of[count], tile, 16);
    }
  }
  static constexpr void shape(TileShapes& shapes, int tile, int rows) {
    shapes.row_bytes[tile] = rows ? 64 : 0;
    shapes.rows[tile] = static_cast<unsigned char>(rows);
  }
};
constexpr ShapesOfCounts kShapes;

/// The thread's tile registers, for a call with `count` rows: rows beyond are neither read nor written. Released at its end, so
/// that a switch of threads need not save 8 KiB. The intrinsics take literal numbers only.
class TileRegisters {
 public:
  explicit TileRegisters(int count) {
    __asm__ volatile("" ::: "memory");  // g++'s intrinsics do not say that they read what was stored before
    _tile_loadconfig(&kShapes.of[count]);
  }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

  template <int Row, int Column> void clear_sum() {
    if constexpr (Row == 0 && Column == 0) _tile_zero(0);
    if constexpr (Row == 0 && Column == 1) _tile_zero(1);
    if constexpr (Row == 1 && Column == 0) _tile_zero(2);
    if constexpr (Row == 1 && Column == 1) _tile_zero(3);
  }
  template <int Row, int Column> void load_sum(const float* p, i64 stride) {
    if constexpr (Row == 0 && Column == 0) _tile_loadd(0, p, stride);
    if constexpr (Row == 0 && Column == 1) _tile_loadd(1, p, stride);
    if constexpr (Row == 1 && Column == 0) _tile_loadd(2, p, stride);
    if constexpr (Row == 1 && Column == 1) _tile_loadd(3, p, stride);
  }
  template <int Row, int Column> void store_sum(float* p, i64 stride) {
    if constexpr (Row == 0 && Column == 0) _tile_stored(0, p, stride);
    if constexpr (Row == 0 && Column == 1) _tile_stored(1, p, stride);
    if constexpr (Row == 1 && Column == 0) _tile_stored(2, p, stride);
    if constexpr (Row == 1 && Column == 1) _tile_stored(3, p, stride);
  }
  template <int Row> void load_left(const Packed* p, i64 stride) {
    if constexpr (Row == 0) _tile_loadd(4, p, stride);
    if constexpr (Row == 1) _tile_loadd(5, p, stride);
  }
  template <int Column> void load_right(const Packed* p, i64 stride) {
    if constexpr (Column == 0) _tile_loadd(6, p, stride);
    if constexpr (Column == 1) _tile_loadd(7, p, stride);
  }
  template <int Row, int Column> void dot() {
    if constexpr (Row == 0 && Column == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (Row == 0 && Column == 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (Row == 1 && Column == 0) _tile_dpbf16ps(2, 5, 6);
    if constexpr (Row == 1 && Column == 1) _tile_dpbf16ps(3, 5, 7);
  }
};

}  // namespace
}  // namespace narrows::cpu

#include "cpu/tile_kernels_registers.inl.hpp"

namespace narrows::cpu {
constinit const InstructionSet kTileKernelsAmx{kKernels<float>, {}};
}  // namespace narrows::cpu
