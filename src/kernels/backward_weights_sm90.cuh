// P^T and dS^T of a step in the accumulators and operands of a thread.
#pragma once
#include "kernels/backward_pipeline_sm90.cuh"

namespace narrows {

// P^T or dS^T of a step as the first operand of dV or dK.
using Operands = u32[kBlockQueries / 16][4];

inline void pack_operands(Operands& a, const Scores& s) {
#pragma unroll
  for (int i = 0; i < kBlockQueries / 16; ++i)
#pragma unroll
    for (int n = 0; n < 4; ++n) a[i][n] = pack(s[0][2 * i + n / 2][n % 2 * 2], s[0][2 * i + n / 2][n % 2 * 2 + 1]);
}

// Two neighbouring queries of each of two tiles of 8, j and j + 1: references, or behind these deltas.
struct FourFacts {
  u32 words[4];

  FourFacts(u32 facts, int j) {
    load_shared128(facts + static_cast<u32>(32 * j) + threadIdx.x % 4 * 16, words[0], words[1], words[2], words[3]);
  }
  float operator()(int tile, int e) const { return as_float(words[tile % 2 * 2 + e]); }
};

// Scores become P^T.
inline void weigh_step(Scores& s, float c, u32 references) {
#pragma unroll
  for (int j = 0; j < kQueryTiles; j += 2) {
    const FourFacts reference(references, j);
#pragma unroll
    for (int m = 0; m < 8; ++m) {
      float& x = s[0][j + m / 4][m % 4];
      x = exp2_approx(min_or_nan(__fmaf_rn(x, c, -reference(m / 4, m % 2)), 0.f));
    }
  }
}

// What rounding to 16 bits takes from P^T, of which dS^T is to be made: registers are too few for both. A byte of each weight, the
// one behind the 16 bits, a tile of 8 queries a word.
using Remainders = u32[kQueryTiles];
static_assert(kElement == Element::bf16, "the upper half of an fp32 number");

inline void keep_remainders(Remainders& rest, const Scores& p) {
#pragma unroll
  for (int j = 0; j < kQueryTiles; ++j) {
    const u32 low = pick_bytes(as_bits(p[0][j][0]), as_bits(p[0][j][1]), 0x0051);
    const u32 high = pick_bytes(as_bits(p[0][j][2]), as_bits(p[0][j][3]), 0x5100);
    rest[j] = pick_bytes(low, high, 0x7610) ^ 0x80808080u;
  }
}

// A weight to 2^-16 of itself. pair: it and its neighbour, rounded to nearest: up where the byte behind was 0x80 or more, which
// the exclusive or above made less. Of one weight in 2^17, a tie that went down, 2^-8 of it is lost.
inline float weight_of(u32 pair, u32 rest, int i) {
  const u32 byte = static_cast<u32>(4 + i) * 0x11;
  return as_float(pick_bytes(pair, rest, (i % 2 == 0 ? 0x1000u : 0x3200u) + byte) - 0x8000u);
}

// dS^T = P^T (dP^T - delta), as an operand.
inline void differentiate_step(Operands& d, const Scores& g, const Operands& p, const Remainders& rest, u32 deltas) {
#pragma unroll
  for (int j = 0; j < kQueryTiles; j += 2) {
    const FourFacts delta(deltas, j);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int tile = j + n / 2, first = n % 2 * 2;
      float x[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        x[e] = weight_of(p[j / 2][n], rest[tile], first + e) * (g[0][tile][first + e] - delta(tile, e));
      d[j / 2][n] = pack(x[0], x[1]);
    }
  }
}

}  // namespace narrows
