// Rows of a cache or of pages, and rotary position embedding (Su et al., RoFormer, 2021): pairs of a row's elements are turned by
// an angle that grows with the position.
#pragma once
#include "kernels/cache_sequences.cuh"
#include "kernels/smem_tile.cuh"

namespace narrows {

constexpr int kPieceElements = kUnitBytes / kElementBytes;

// Where slot `slot` of row `row` of the cache or of the block table is: row `number` of batch row or page `row` of k and v. broken: the
// table's entry is no page, and another takes its place.
struct Slot {
  i32 row, number;
  bool broken;
  i32 entry;
};

// early: perhaps before the kernel ahead has written the entry; past L1, where what is read now must not stay.
inline Slot slot_of(const DecodeArgs& args, i32 row, i32 slot, bool early = false) {
  if (args.table == nullptr) return {row, slot, false, 0};
  const auto [page, number] = args.by_page.divide(slot);
  const i32* const place = args.table + row * args.table_row + page * args.table_stride;
  const i32 entry = early ? static_cast<i32>(load_relaxed(reinterpret_cast<const u32*>(place))) : *place;
  const i32 nearest = clamp_to(entry, 0, args.pages - 1);
  return {nearest, number, nearest != entry, entry};
}

// Another lane's address.
inline const char* from_lane(const char* p, int lane) {
  return reinterpret_cast<const char*>(__shfl_sync(~0u, reinterpret_cast<u64>(p), lane));
}

// Element x of a row at a position, turned by the angle of its pair.
inline float rotated(const DecodeArgs& args, const char* row, i64 stride, i64 position, i32 x) {
  const auto element = [&](i32 index) { return load_element(row + index * stride, kElement); };
  const i32 pairs = args.rotary_pairs;
  if (x >= 2 * pairs) return element(x);
  const i32 pair = args.rotary_interleaved ? x / 2 : x % pairs;
  const bool second = args.rotary_interleaved ? x % 2 == 1 : x >= pairs;
  const auto angle = [&](const TensorArg& table) {
    return load_element(table.data + position * table.strides[0] + pair * table.strides[1], table.element);
  };
  const i32 step = args.rotary_interleaved ? 1 : pairs;
  const float cosine = angle(args.rotary_cos), sine = angle(args.rotary_sin);
  if (second) return __fmaf_rn(element(x - step), sine, __fmul_rn(element(x), cosine));
  return __fmaf_rn(element(x), cosine, -__fmul_rn(element(x + step), sine));
}

}  // namespace narrows
