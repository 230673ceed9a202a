// Shared memory of the sm90 kernel: its tiles, the barriers that hand them to and fro, and the rings of stages of K and
// V.
#pragma once
#include "kernels/descriptor.cuh"
#include "kernels/ptx_sm90.cuh"
#include "kernels/ring.cuh"
#include "kernels/tile_facts.cuh"

namespace narrows {

using QueryRing = RingOf<kQueryStages>;  // of Q; Ring is of K, or of V

// O leaves through a tile of its own in pieces of so many columns.
constexpr int kOutputColumns = kOwnOutputTile ? min_of(kValueDim, 128) : kValueDim;
constexpr SmemTile kQueryPart = chunked(kPartRows, kHeadDim), kOutputPart = chunked(kPartRows, kOutputColumns);
constexpr SmemTile kKeyStage = chunked(kBlockKeys, kHeadDim), kValueStage = chunked(kBlockKeys, kValueDim);

// In the order of addresses: Q of each warpgroup, or O in its place; K's stages; V's; O's own tiles; barriers; facts of
// tiles; what the rows of one see; each warp's note of the one that it ends.
constexpr u32 kPartBytes =
    static_cast<u32>(kOwnOutputTile ? kQueryPart.bytes() : max_of(kQueryPart.bytes(), kOutputPart.bytes()));
constexpr u32 kKeysAt = kQueryStages * kWarpgroups * kPartBytes,
              kValuesAt = kKeysAt + static_cast<u32>(kStages * kKeyStage.bytes());
constexpr u32 kOutputAt = kValuesAt + static_cast<u32>(kStages * kValueStage.bytes());
constexpr int kBarriers = 42;
constexpr u32 kBarriersAt = kOutputAt + static_cast<u32>(kOwnOutputTile ? kWarpgroups * kOutputPart.bytes() : 0);
constexpr u32 kFactsAt = kBarriersAt + 8 * kBarriers;
static_assert(kQueryStages <= 2 && (kOwnOutputTile || kQueryStages == 1));
static_assert(kStages <= 4 && kWarpgroups <= 4 && kFactSlots <= 4, "barrier numbers leave room for no more");

// A ring's stages: shared addresses of the first one's tile, full barrier and empty barrier.
struct Stages {
  u32 tiles, full, empty, bytes;

  u32 tile(const Ring& at) const { return tiles + static_cast<u32>(at.stage) * bytes; }
  u32 full_barrier(const Ring& at) const { return full + static_cast<u32>(8 * at.stage); }
  u32 empty_barrier(const Ring& at) const { return empty + static_cast<u32>(8 * at.stage); }
};

// Arrivals of a stage of K or V: of the engine's caller, or of every lane that gathers rows. And who reads facts without
// computing.
constexpr u32 kBringArrivals = kGathers ? u32{kWarp} : 1, kBringReaders = kCached ? 3 : 2;

// barrier                count                    arrives                              waits
// full of K and V        kBringArrivals           their producer, with the bytes       every thread that computes
// empty of K and V       4 per warpgroup          a lane of each warp that computes    their producer
// query_full             1                        Q's producer, with the bytes         its warpgroup
// query_empty            4, or 1 if O takes Q's   a lane of each warp, or the storer   Q's producer
// facts_full             1                        the scheduler                        all others
// facts_empty            4 per warpgroup, and      each reader                          the scheduler
//                        kBringReaders
// tile_wanted            1                        K's producer, a tile nearly asked    the scheduler
//                                                 for
struct Shared {
  u32 base;

  static constexpr u32 barrier(int number) { return kBarriersAt + static_cast<u32>(8 * number); }
  u32 query_full(int warpgroup, const QueryRing& at) const { return base + barrier(4 * at.stage + warpgroup); }
  u32 query_empty(int warpgroup, const QueryRing& at) const { return base + barrier(32 + 4 * at.stage + warpgroup); }
  u32 facts_full(int slot) const { return base + barrier(24 + slot); }
  u32 facts_empty(int slot) const { return base + barrier(28 + slot); }
  u32 tile_wanted() const { return base + barrier(40); }
  Stages keys() const {
    return {base + kKeysAt, base + barrier(8), base + barrier(12), static_cast<u32>(kKeyStage.bytes())};
  }
  Stages values() const {
    return {base + kValuesAt, base + barrier(16), base + barrier(20), static_cast<u32>(kValueStage.bytes())};
  }
  u32 query_part(int warpgroup, const QueryRing& at) const {
    return base + static_cast<u32>(at.stage * kWarpgroups + warpgroup) * kPartBytes;
  }
  u32 output_part(int warpgroup) const {
    return kOwnOutputTile ? base + kOutputAt + static_cast<u32>(warpgroup * kOutputPart.bytes())
                          : query_part(warpgroup, {});
  }
};

inline void init_barriers(const Shared& shared) {
  for (QueryRing at; at.phase == 0; at.next())
    for (int w = 0; w < kWarpgroups; ++w) {
      init_barrier(shared.query_full(w, at), 1);
      init_barrier(shared.query_empty(w, at), kOwnOutputTile ? 4 : 1);
    }
  for (Ring at; at.phase == 0; at.next()) {
    init_barrier(shared.keys().full_barrier(at), kBringArrivals);
    init_barrier(shared.keys().empty_barrier(at), 4 * kWarpgroups);
    init_barrier(shared.values().full_barrier(at), kBringArrivals);
    init_barrier(shared.values().empty_barrier(at), 4 * kWarpgroups);
  }
  for (int slot = 0; slot < kFactSlots; ++slot) {
    init_barrier(shared.facts_full(slot), 1);
    init_barrier(shared.facts_empty(slot), 4 * kWarpgroups + kBringReaders);
  }
  init_barrier(shared.tile_wanted(), 1);
  fence_barrier_init();
}

constexpr u32 kRowsAt = kFactsAt + kFactSlots * static_cast<u32>(sizeof(TileFacts));
constexpr u32 kBlocksAt = kRowsAt + (kLimitsKeys ? kBlockQueries * static_cast<u32>(sizeof(Keys)) : 0);
static_assert(kBlocksAt + kWarps * sizeof(QueryBlock) <= kSharedBytes, "the planner's bytes are enough");

// The slots of facts in the order of tiles, as one that reads them sees it.
struct FactsReader {
  const Shared& shared;
  const TileFacts* slots;
  u32 round = 0;

  int slot() const { return static_cast<int>(round % kFactSlots); }
  u32 parity() const { return round / kFactSlots & 1; }
  const TileFacts& wait() const {
    wait_barrier(shared.facts_full(slot()), parity());
    return facts();
  }
  const TileFacts& facts() const { return slots[slot()]; }
  FactsReader last() const { return {shared, slots, round - 1}; }
  // One thread of each reader.
  void release() const { arrive(shared.facts_empty(slot())); }
};

}  // namespace narrows
