// How parts of dQ reach its sums in scratch: a warp's, one after the other, and where asked for in the order of key blocks.
#pragma once
#include "kernels/backward_steps_sm90.cuh"

namespace narrows {

// Deterministic: key blocks add to some query blocks, a group, in their order. Who is the first to add to a block stores.
constexpr i32 kGroup = max_of(kTurnRows / kBlockQueries, 1);  // query blocks

inline bool begins_group(const KeyBlock& block, const Place& place) {
  return place.tile % kGroup == 0 || place.tile == block.begin_tile;
}
inline bool ends_group(const KeyBlock& block, const Place& place) {
  return place.tile % kGroup == kGroup - 1 || place.tile == block.end_tile - 1;
}
// The block's number among those that see some of `tiles` query blocks, in the order of turns.
inline u32 turn_number(const CallArgs& args, const KeyBlock& block, i32 first_tile, i32 tiles) {
  const i32 own = block.first / kBlockKeys;
  return static_cast<u32>(kLastKeysFirst ? last_key_block(args, block, first_tile, tiles) - own
                                         : own - first_key_block(args, block, first_tile, tiles));
}
// Whether nobody has added to the step's sums before.
inline bool is_first(const CallArgs& args, const KeyBlock& block, const Place& place) {
  return kLimitsKeys ? turn_number(args, block, place.tile, 1) == 0 : block.first == 0;
}

// 64 query rows and 64 columns of dS K.
using SumsOfChunk = float[1][kChunkColumns / 8][4];

// A burst would hold up what the other warps have in shared memory: one sum of four goes each kPace clocks.
// first: to sums that hold nothing yet.
inline void send_sums(const SumsOfChunk& part, float* to, bool first, bool last) {
  const u32 start = clock() - (last ? kPace * kChunkColumns / 8 : 0);  // behind the last step the others wait for this
#pragma unroll
  for (int j = 0; j < kChunkColumns / 8; ++j) {
    while (clock() - start < static_cast<u32>(j * kPace)) {
    }
    float* const four = to + j * 4 * kWarp;
    const float(&x)[4] = part[0][j];
    if (kDeterministic && first)
      store_global4(four, {x[0], x[1], x[2], x[3]});
    else
      add_global4(four, x);
  }
}

}  // namespace narrows
