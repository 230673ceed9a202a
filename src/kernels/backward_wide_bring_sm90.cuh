// The thread of the sm90 backward kernel of wide heads that brings tiles.
#pragma once
#include "kernels/backward_wide_pipeline_sm90.cuh"

namespace narrows {

constexpr u32 kLoader =
    kFirstKeySummer * kWarpgroup;  // the thread; its warpgroup is the first to know that a stage is free

// The thread block's half of a step's rows, to both.
template <SmemTile tile> inline void load_half(u32 to, const TensorMap& map, u32 barrier, BoxPlace from, int rank) {
  constexpr int rows = tile.rows / kCluster;
  from.row += rank * rows;
  to += static_cast<u32>(rank * rows * kChunkBytes);
  for (int chunk = 0; chunk < tile.row_bytes / kChunkBytes; ++chunk, from.column += kChunkColumns)
    load_box_everywhere<kCluster>(to + static_cast<u32>(chunk * tile.rows * kChunkBytes), map, barrier, from,
                                  kEvictLast);
}

struct Loader {
  const Role& role;
  const KeyBlock& block;

  explicit Loader(const Role& role_) : role(role_), block(role_.facts.block) {}

  i32 key_sequence() const { return is_varlen(role.args.cu_seqlens_k) ? 0 : block.sequence; }
  BoxPlace own_keys() const {
    return {0, block.first_key + block.first + role.first_own(), block.kv_head, key_sequence()};
  }
  // K; of the other's K the columns whose dQ is summed here, for the products of dQ alone.
  void load_keys() const {
    const BackwardSm90Args& args = role.args;
    const Shared& shared = role.shared;
    const int chunks = chunks_of(kHeadChunks, role.rank);
    arrive_expecting(shared.keys_full(),
                     static_cast<u32>(kOwnKeyTile.bytes()) + static_cast<u32>(chunks) * kChunkOfTile);
    load_tile<kOwnKeyTile>(shared.keys(), args.k_map, shared.keys_full(), own_keys(), kEvictFirst);
    BoxPlace others{first_chunk(kHeadChunks, role.rank) * kChunkColumns,
                    block.first_key + block.first + (1 - role.rank) * kOwnKeys, block.kv_head, key_sequence()};
    for (int chunk = 0; chunk < chunks; ++chunk, others.column += kChunkColumns)
      load_box(shared.other_keys() + static_cast<u32>(chunk) * kChunkOfTile, args.k_map, shared.keys_full(), others,
               kEvictFirst);
  }
  void load_values() const {
    const u32 barrier = role.shared.values_full();
    arrive_expecting(barrier, static_cast<u32>(kOwnValueTile.bytes()));
    load_tile<kOwnValueTile>(role.shared.values(), role.args.v_map, barrier, own_keys(), kEvictFirst);
  }

  BoxPlace rows_of_step(const Place& place) const {
    return {0, block.first_query + place.tile * kBlockQueries, place.head,
            is_varlen(role.args.cu_seqlens_q) ? 0 : block.sequence};
  }
  void load_queries(const Place& place, const Ring& ring) const {
    const Shared& shared = role.shared;
    const u32 barrier = shared.queries_full(ring.stage);
    wait_barrier(shared.queries_empty(ring.stage), ring.phase ^ 1);
    arrive_expecting(barrier, static_cast<u32>(kQueryTile.bytes()) + kFactBytes);
    load_half<kQueryTile>(shared.queries(ring.stage), role.args.q_map, barrier, rows_of_step(place), role.rank);
  }
  void load_facts(const Place& place, const Ring& ring) const {
    load_bytes(role.shared.facts(ring.stage),
               role.args.rows + query_block_number(role.args, block, place.head, place.tile) * kBlockQueries,
               kFactBytes, role.shared.queries_full(ring.stage));
  }
  void load_outputs(const Place& place, const OutputRing& ring) const {
    const Shared& shared = role.shared;
    const u32 barrier = shared.outputs_full(ring.stage);
    wait_barrier(shared.outputs_empty(ring.stage), ring.phase ^ 1);
    arrive_expecting(barrier, static_cast<u32>(kOutputTile.bytes()));
    load_half<kOutputTile>(shared.outputs(ring.stage), role.args.dout_map, barrier, rows_of_step(place), role.rank);
  }
};

}  // namespace narrows
