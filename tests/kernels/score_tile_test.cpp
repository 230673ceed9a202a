// Tiles of a bias and a mask, as a warp brings and reads them: every element where it belongs, and nothing else read.
#include <gtest/gtest.h>

#include <random>

#include "tests/kernels/device/device.hpp"

namespace scores {
#include "shared/forward_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::bf16, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 32, kValueDim = 32, kBlockQueries = 64, kBlockKeys = 32, kWarps = 2,
                               kThreads = 32 * kWarps;
}  // namespace narrows

#include "kernels/score_tile.cuh"

namespace narrows {

constexpr int kWarpOfTest = 1, kFirstKey = 2 * kBlockKeys, kFirstRow = 128;

/// x[row][key] of one sequence and head, and no byte more.
template <class T> struct Source {
  std::vector<T> x;
  TensorArg arg;

  Source(i64 rows, i64 keys, i64 row_stride, i64 key_stride)
      : x(static_cast<std::size_t>((rows - 1) * row_stride + (keys - 1) * key_stride + 1)) {
    for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<T>(i % 251);
    arg.data = reinterpret_cast<char*>(x.data());
    arg.strides[2] = row_stride * static_cast<i64>(sizeof(T));
    arg.strides[3] = key_stride * static_cast<i64>(sizeof(T));
  }
};

/// read(lane's row, even column) of what the warp brought, against the source.
template <class T, class Load, class Read>
void expect_tile(const Source<T>& source, i64 row_stride, i64 key_stride, i32 rows, i32 keys, u32 bytes,
                 const Load& load, const Read& read) {
  QueryBlock block{};
  block.first_row = kFirstRow;
  block.queries = rows;
  block.keys = keys;
  ::narrows::test::Warp warp(bytes);
  warp.run([&](int) { load(source.arg, block); }, kWarpOfTest * kWarp);
  warp.run(
      [&](int lane) {
        if (lane != 0) return;
        for (i32 row = kWarpOfTest * kWarpRows; row < min_of(kBlockQueries, rows - kFirstRow); ++row)
          for (i32 column = 0; column < kBlockKeys; ++column) {
            if (kFirstKey + column >= keys) continue;
            const i64 at = (kFirstRow + row) * row_stride + (kFirstKey + column) * key_stride;
            ASSERT_EQ(read(row, column), static_cast<float>(source.x[static_cast<std::size_t>(at)]))
                << "row " << row << ", column " << column;
          }
      },
      kWarpOfTest * kWarp);
}

struct Shape {
  i64 row_padding, key_stride;
  i32 rows, keys;
};
// Pieces of 16 bytes, of 4, and elements; whole tiles and cut ones.
constexpr Shape kShapes[]{{0, 1, 192, 96}, {0, 1, 180, 80}, {1, 1, 192, 96}, {0, 1, 170, 77},
                          {0, 2, 192, 96}, {3, 3, 161, 65}, {4, 1, 192, 68}, {0, 1, 160, 96}};

TEST(ScoreTile, bias) {
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(testing::Message() << shape.rows << "x" << shape.keys << " stride " << shape.key_stride);
    const i64 row_stride = shape.keys * shape.key_stride + shape.row_padding;
    const Source<float> source(shape.rows, shape.keys, row_stride, shape.key_stride);
    expect_tile(
        source, row_stride, shape.key_stride, shape.rows, shape.keys, kBiasTile.bytes(),
        [](const TensorArg& tensor, const QueryBlock& block) {
          ForwardArgs args;
          args.bias = tensor;
          load_bias(0, args, block, kFirstKey);
        },
        [](i32 row, i32 column) {
          float pair[2];
          read_bias(pair, 0, row, column / 2 * 2);
          return pair[column % 2];
        });
  }
}

TEST(ScoreTile, mask) {
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(testing::Message() << shape.rows << "x" << shape.keys << " stride " << shape.key_stride);
    const i64 row_stride = shape.keys * shape.key_stride + shape.row_padding;
    const Source<unsigned char> source(shape.rows, shape.keys, row_stride, shape.key_stride);
    expect_tile(
        source, row_stride, shape.key_stride, shape.rows, shape.keys, kMaskTile.bytes(),
        [](const TensorArg& tensor, const QueryBlock& block) {
          ForwardArgs args;
          args.mask = tensor;
          load_mask(0, args, block, kFirstKey);
        },
        [](i32 row, i32 column) {
          return static_cast<float>(read_mask(0, row, column / 2 * 2) >> column % 2 * 8 & 0xffu);
        });
  }
}

}  // namespace narrows
}  // namespace scores
