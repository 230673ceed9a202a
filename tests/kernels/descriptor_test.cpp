// What wgmma is told of tiles: the fields of a descriptor, where each step of a sum begins, and the ring of stages.
#include "kernels/descriptor.cuh"

#include <gtest/gtest.h>

#include <array>
#include <vector>

namespace narrows {
namespace {

struct Fields {
  u64 address, leading, stride, swizzle, others;
};

/// Bytes; from the PTX manual's table of the 64 bits.
Fields fields(u64 descriptor) {
  const auto bits = [&](int first, int count) { return descriptor >> first & ((u64{1} << count) - 1); };
  return {bits(0, 14) * 16, bits(16, 14) * 16, bits(32, 14) * 16, bits(62, 2),
          bits(14, 2) | bits(30, 2) | bits(46, 16)};
}

constexpr std::array kRows{48, 64, 80, 112, 128, 176};

TEST(Descriptor, has_the_fields_of_the_manual) {
  for (const int rows : kRows)
    for (const u32 address : {u32{0}, u32{1024}, u32{227 * 1024}}) {
      const SmemTile tile = chunked(rows, 128);
      const Fields along = fields(descriptor_along_rows(address)),
                   down = fields(descriptor_down_columns(address, tile));
      for (const Fields& found : {along, down}) {
        EXPECT_EQ(found.address, address);
        EXPECT_EQ(found.stride, 1024u) << "8 rows of 128 bytes";
        EXPECT_EQ(found.swizzle, 1u) << "128 bytes";
        EXPECT_EQ(found.others, 0u);
      }
      EXPECT_EQ(down.leading, static_cast<u64>(rows) * 128) << "to the next 64 columns";
    }
}

TEST(Descriptor, tiles_are_whole_chunks_of_64_columns) {
  EXPECT_EQ(chunked(64, 64).row_bytes, 128);
  EXPECT_EQ(chunked(64, 96).row_bytes, 256);
  EXPECT_EQ(chunked(80, 192).bytes(), 80 * 384);
  for (const int rows : kRows) EXPECT_EQ(chunked(rows, 256).bytes() % 1024, 0) << "the next tile is aligned";
}

/// A step begins at the 16-byte unit where its first element lies, before the swizzle, which the hardware does.
TEST(Descriptor, steps_begin_where_their_elements_lie) {
  for (const int rows : kRows)
    for (const int columns : {64, 96, 128, 192, 256}) {
      const SmemTile tile = chunked(rows, columns);
      for (int i = 0; i < columns / 16; ++i) {
        const u32 first = tile.offset(0, 2 * i);  // row 0 is not swizzled
        EXPECT_EQ(fields(descriptor_along_rows(2048) + step_along_rows(tile, i)).address, 2048 + first);
      }
      for (int i = 0; i < rows / 16; ++i) {
        const u32 first = tile.offset(16 * i, 0);
        EXPECT_EQ(fields(descriptor_down_columns(2048, tile) + step_down_columns(i)).address, 2048 + first);
      }
    }
}

}  // namespace
}  // namespace narrows
