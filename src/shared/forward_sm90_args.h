// What the forward kernel of family sm90 is given when it is launched.
#pragma once
#include "shared/forward_args.h"
#include "shared/tile_order.h"

namespace narrows {

// What the copy engine knows of a tensor: as large and aligned as the driver's own type for it.
struct alignas(64) TensorMap {
  unsigned char bytes[128];
};

// n / value of n below 2^31 by a product: three instructions instead of the twenty-five of a division.
struct Divisor {
  u32 value = 1, multiplier = 1, shift = 0;

  constexpr Divisor() = default;
  // Not 0. The shift is the logarithm rounded up, the multiplier what 2^(32 + shift) / value has above 2^32, rounded
  // up.
  constexpr explicit Divisor(u32 by) : value(by) {
    while ((u64{1} << shift) < by) ++shift;
    multiplier = static_cast<u32>((((u64{1} << shift) - by) << 32) / by + 1);
  }
  constexpr u32 quotient(u32 n) const { return (static_cast<u32>(u64{n} * multiplier >> 32) + n) >> shift; }
};

// tile_order.h's tile_number for a call whose divisors are known.
struct TileOrder {
  Divisor tiles_of_section, section, last_section;  // the last one may have fewer pairs
  u32 blocks = 0, pairs = 0;

  constexpr TileOrder() = default;
  constexpr TileOrder(u32 blocks_, u32 pairs_, u32 section_)
      : tiles_of_section(section_ * blocks_),
        section(section_),
        last_section(pairs_ - (pairs_ - 1) / section_ * section_),
        blocks(blocks_),
        pairs(pairs_) {}
  constexpr TileNumber at(u32 index) const {
    const u32 number = tiles_of_section.quotient(index), rest = index - number * tiles_of_section.value;
    const u32 first = number * section.value;
    const Divisor& width = pairs - first < section.value ? last_section : section;
    const u32 row = width.quotient(rest);
    return {static_cast<i32>(blocks - 1 - row), static_cast<i32>(first + rest - row * width.value)};
  }
};

struct ForwardSm90Args : ForwardArgs {
  TensorMap q_map, k_map, v_map, o_map;  // of columns, rows, heads, sequences
  u32 tiles = 0;                         // of query rows and heads, some of them without rows
  u32* tiles_taken = nullptr;            // 0 when the kernel begins; null: thread blocks take every gridDim.x-th tile
  TileOrder order;
  Divisor heads_divisor, group_divisor;

  // Of its blocks, heads and section; pairs as tile_order.h counts them.
  constexpr void set_tiles(u32 pairs) {
    tiles = static_cast<u32>(blocks) * pairs;
    order = TileOrder(static_cast<u32>(blocks), pairs, min_of(static_cast<u32>(section), pairs));
    heads_divisor = Divisor(static_cast<u32>(heads));
    group_divisor = Divisor(static_cast<u32>(group));
  }
};

}  // namespace narrows
