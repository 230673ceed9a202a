// What the rows of a warp see, as its lanes find it together, against the definition.
#include <gtest/gtest.h>

#include <random>

#include "tests/kernels/device/device.hpp"

namespace sight {
#include "shared/forward_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::bf16;
[[maybe_unused]] constexpr int kHeadDim = 32, kValueDim = 32, kBlockQueries = 64, kBlockKeys = 32, kWarps = 2,
                               kThreads = 32 * kWarps;
}  // namespace narrows

#include "kernels/query_block.cuh"

namespace narrows {

constexpr i32 kWarpOfTest = 1;

struct Looking {
  std::mt19937 random;
  std::vector<i32> begins, ends;
  ForwardArgs args;
  QueryBlock block{};

  i32 between(i32 low, i32 high) { return std::uniform_int_distribution<i32>(low, high)(random); }

  /// Sequence 2 of a dense or a varlen call, whose bounds lie in any order in memory.
  explicit Looking(unsigned seed) : random(seed), begins(4096), ends(4096) {
    for (std::vector<i32>* bounds : {&begins, &ends})
      for (i32& bound : *bounds) bound = between(0, 7) == 0 ? between(INT_MIN, INT_MAX) : between(-5, 205);
    const bool varlen = between(0, 1) != 0;
    block.sequence = 2;
    block.first_query = varlen ? between(0, 300) : 0;
    block.first_row = 64 * between(0, 1);
    block.queries = between(block.first_row, block.first_row + 70);
    block.keys = between(0, 200);
    block.shift = between(-40, 100);
    args.visibility = make_mask(between(0, 1) ? between(0, 90) : -1, -1, between(0, 1) != 0, between(0, 1) * 50);
    if (between(0, 3)) args.key_begin = {begins.data() + 2048, varlen ? 0 : between(-300, 300), between(-2, 2)};
    if (between(0, 3)) args.key_end = {ends.data() + 2048, varlen ? 0 : between(-300, 300), between(-2, 2)};
  }

  bool sees(i32 i, i32 j) const {
    const auto bound = [&](const RowIndicesArg& of) {
      return of.data[2 * of.batch_stride + (block.first_query + i) * of.stride];
    };
    return visible(args.visibility, i + block.shift, j, block.keys) &&
           (!args.key_begin.data || j >= bound(args.key_begin)) && (!args.key_end.data || j < bound(args.key_end));
  }
};

TEST(KernelSight, rows_hull_and_common_keys_are_those_of_the_definition) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    const Looking looking(seed);
    std::array<Keys, kBlockQueries> rows;
    std::array<Sight, kWarps> sights;
    ::narrows::test::Warp warp(0);
    warp.run([&](int) { look(looking.args, looking.block, rows.data(), sights.data()); }, kWarpOfTest * kWarp);
    const i32 first = looking.block.first_row + kWarpOfTest * kWarpRows;
    const Sight& sight = sights[kWarpOfTest];
    i32 hull_begin = kMostKey, hull_end = 0;
    for (i32 j = 0; j < looking.block.keys; ++j) {
      bool all = true;
      for (i32 row = 0; row < kWarpRows; ++row) {
        const bool exists = first + row < looking.block.queries, seen = exists && looking.sees(first + row, j);
        const Keys& keys = rows[static_cast<std::size_t>(kWarpOfTest * kWarpRows + row)];
        ASSERT_EQ(keys.begin <= j && j < keys.end, seen) << "row " << first + row << " key " << j;
        if (seen) hull_begin = min_of(hull_begin, j);
        if (seen) hull_end = j + 1;
        all = all && (seen || !exists);
      }
      ASSERT_EQ(sight.common.begin <= j && j < sight.common.end, all) << "key " << j;
    }
    EXPECT_EQ(sight.hull.begin, hull_begin);
    EXPECT_EQ(sight.hull.end, hull_end);
  }
}

}  // namespace narrows
}  // namespace sight
