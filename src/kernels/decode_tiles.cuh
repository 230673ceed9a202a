// What a warp of the decode kernel holds: some query rows, packed with the query heads that share a kv head, and of a tile of 16
// keys the scores, and parts of K and V as they come from memory.
//
// S = Q K^T has the packed rows as the 16 rows of the product, of which 8 may be all there are. O^T = V^T P^T has them as its 8
// columns: what the first product leaves in a lane is, converted, what the second one takes.
// Lane 4g + c takes of K 16 bytes in every 64 of the rows of keys g and g + 8: a product may add up the head dim in any order
// that Q shares. Of V it takes 16 bytes in every 128 of the rows of keys 2c, 2c + 1, 2c + 8 and 2c + 9.
#pragma once
#include "kernels/decode_facts.cuh"
#include "kernels/products.cuh"

namespace narrows {

constexpr int kRows = kBlockQueries / 8;  // of packed rows, that a lane holds a quarter of the scores of
constexpr int kKeyTiles = kBlockKeys / 8;

constexpr int kHeadBytes = kHeadDim * kElementBytes, kValueBytes = kValueDim * kElementBytes;  // of a row
constexpr int kKeySteps = ceil_div(kHeadBytes, 64), kValueSteps = ceil_div(kValueBytes, 128);
constexpr int kStepColumns = 128 / kElementBytes, kColumns = kValueSteps * kStepColumns;  // of the output
constexpr int kStepTiles = kStepColumns / 16;                                             // of 16 of its columns

// Steps that are in registers together: the largest part of all that leaves room for the accumulators.
constexpr int part_of_steps(int steps, int most) {
  while (steps % most != 0) --most;
  return most;
}
constexpr int kAccumulators = kValueSteps * kStepTiles * 4 * kRows;
constexpr bool kFewRegisters = kAccumulators >= 128 || kElementBytes == 4;
constexpr int kKeyPart = part_of_steps(kKeySteps, kFewRegisters ? 2 : 4),
              kValuePart = part_of_steps(kValueSteps, kFewRegisters ? 1 : 2);
constexpr int kKeyParts = kKeySteps / kKeyPart, kValueParts = kValueSteps / kValuePart;

using Scores = float[1][kKeyTiles][4];
using Outputs = float[kRows][kValueSteps][kStepTiles][4];  // of O^T
using KeyPieces = u32[2][kKeyPart][4];
using ValuePieces = u32[4][kValuePart][4];

struct DecodeLane {
  int lane = static_cast<int>(threadIdx.x % kWarp);
  int g = lane / 4, c = lane % 4;

  int row(int r) const { return 8 * r + g; }  // packed, of the r-th quarter of scores
};

// The packed rows of Q, as they are in the tensor; a quarter of a warp's lanes reads from different banks.
constexpr int kQueryStride = kKeySteps * 64 + kUnitBytes;  // bytes

// Byte `byte` of a row of which `bytes` exist, or else the last 16 of them. sure: bytes that every program's rows have.
template <int sure> inline u32 piece_at(int step_byte, int lane_byte, int bytes) {
  const int byte = step_byte + lane_byte;
  return static_cast<u32>(step_byte < sure ? byte : min_of(byte, bytes - kUnitBytes));
}

// A head dim of this width is larger than the next narrower one.
constexpr int narrower(int width) {
  int below = 0;
  for (const int other : {32, 64, 96, 128, 192, 256, 512}) below = other < width ? other : below;
  return below;
}

// 16 bytes of a row of which `columns` elements exist; with kCopyBytes 0 these lie anywhere. Not valid: nothing is read, and the
// piece stays what it was.
template <int sure>
inline void load_piece(u32 (&piece)[4], const char* row, int step_byte, int lane_byte, i32 columns, i64 stride,
                       bool valid) {
  if constexpr (kCopyBytes != 0) {
    load_stream_if(valid, row + piece_at<sure>(step_byte, lane_byte, columns * kElementBytes), piece);
  } else if (valid) {
    const i32 first = (step_byte + lane_byte) / kElementBytes;
#pragma unroll
    for (int i = 0; i < 4; ++i) piece[i] = 0;
#pragma unroll
    for (int i = 0; i < kPieceElements; ++i)
      if (first + i < columns) {
        const char* at = row + (first + i) * stride;
        if constexpr (kElementBytes == 4)
          piece[i] = *reinterpret_cast<const u32*>(at);
        else
          piece[i / 2] |= u32{*reinterpret_cast<const unsigned short*>(at)} << i % 2 * 16;
      }
  }
}

// Of a lane's rows of K and V.
using KeyPlaces = const char* [2];
using ValuePlaces = const char* [4];

// rows: lane l < 16 has the address of key l's row of K, lane 16 + l of V.
inline void find_keys(KeyPlaces& places, const char* rows) {
#pragma unroll
  for (int r = 0; r < 2; ++r) places[r] = from_lane(rows, 8 * r + DecodeLane().g);
}
inline void find_values(ValuePlaces& places, const char* rows) {
#pragma unroll
  for (int r = 0; r < 4; ++r) places[r] = from_lane(rows, 16 + 2 * DecodeLane().c + r % 2 + r / 2 * 8);
}

inline void load_keys(KeyPieces& k, const KeyPlaces& rows, int part, i32 columns, i64 stride, bool valid) {
  const DecodeLane at;
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int i = 0; i < kKeyPart; ++i)
      load_piece<narrower(kHeadDim) * kElementBytes / 64 * 64>(k[r][i], rows[r], 64 * (part * kKeyPart + i), 16 * at.c,
                                                               columns, stride, valid);
}
inline void load_values(ValuePieces& v, const ValuePlaces& rows, int part, i32 columns, i64 stride, bool valid) {
  const DecodeLane at;
#pragma unroll
  for (int r = 0; r < 4; ++r)
#pragma unroll
    for (int i = 0; i < kValuePart; ++i)
      load_piece<narrower(kValueDim) * kElementBytes / 128 * 128>(v[r][i], rows[r], 128 * (part * kValuePart + i),
                                                                  16 * at.g, columns, stride, valid);
}

inline void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (kElement == Element::fp32)
    mma32(d, Halves<4>(a), Halves<2>({b0, b1}));
  else
    mma16(d, a, b0, b1);
}

// Query pieces of a step: of row g and, where there are 16 packed rows, g + 8.
using QueryPieces = u32[kRows][4];
using Queries = QueryPieces[kKeepsQueries ? kKeySteps : 1];  // that stay in registers

// Four sums that do not wait for each other.
using PartialScores = float[2][kKeyTiles][4];

inline void add_scores(PartialScores& s, const QueryPieces& q, const KeyPieces& k, int i) {
  const auto other = [&](int n) { return kRows == 2 ? q[kRows - 1][n] : 0; };  // without these rows, zeros
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t)
      mma(s[h][t], {q[0][2 * h], other(2 * h), q[0][2 * h + 1], other(2 * h + 1)}, k[t][i][2 * h], k[t][i][2 * h + 1]);
}

// O^T += V^T P^T for the value columns of a part.
inline void add_values(Outputs& o, const Scores& p, const ValuePieces& v, int part) {
#pragma unroll
  for (int i = 0; i < kValuePart; ++i)
#pragma unroll
    for (int j = 0; j < kStepTiles; ++j)
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float(&to)[4] = o[r][part * kValuePart + i][j];
        if constexpr (kElement == Element::fp32) {
#pragma unroll
          for (int t = 0; t < kKeyTiles; ++t)
            mma(to, {v[2 * t][i][2 * j], v[2 * t][i][2 * j + 1], v[2 * t + 1][i][2 * j], v[2 * t + 1][i][2 * j + 1]},
                as_bits(p[0][t][2 * r]), as_bits(p[0][t][2 * r + 1]));
        } else {
          u32 a[4];
#pragma unroll
          for (int t = 0; t < 2; ++t) {  // two keys of one column, side by side
            a[2 * t] = __byte_perm(v[2 * t][i][j], v[2 * t + 1][i][j], 0x5410);
            a[2 * t + 1] = __byte_perm(v[2 * t][i][j], v[2 * t + 1][i][j], 0x7632);
          }
          mma(to, a, pack(p[0][0][2 * r], p[0][0][2 * r + 1]), pack(p[0][1][2 * r], p[0][1][2 * r + 1]));
        }
      }
}

// factor[r] is of packed row 8r + g; the accumulators are of rows 8r + 2c and the next.
inline void scale_rows(Outputs& o, const float (&factor)[kRows]) {
  const DecodeLane at;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float even = __shfl_sync(~0u, factor[r], 8 * at.c), odd = __shfl_sync(~0u, factor[r], 8 * at.c + 4);
#pragma unroll
    for (int i = 0; i < kValueSteps; ++i)
#pragma unroll
      for (int j = 0; j < kStepTiles; ++j) {
        o[r][i][j][0] *= even;
        o[r][i][j][1] *= odd;
        o[r][i][j][2] *= even;
        o[r][i][j][3] *= odd;
      }
  }
}

}  // namespace narrows
