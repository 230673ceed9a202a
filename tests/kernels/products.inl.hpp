// Included in the namespace of device text with its constants: the products of a warp against plain sums.

#include "tests/kernels/matrices.inl.hpp"

constexpr int kWarpOfTest = 1;  // whose rows are not the tile's first
constexpr u32 kKeysAt = kQueryTile.bytes(), kValuesAt = kKeysAt + kKeyTile.bytes();

template <class Draw> void expect_products(const Draw& draw, double tolerance) {
  Matrix q(kBlockQueries, kHeadDim), k(kBlockKeys, kHeadDim), v(kBlockKeys, kValueDim), p(kWarpRows, kBlockKeys);
  for (Matrix* matrix : {&q, &k, &v, &p}) matrix->fill(draw);
  ::narrows::test::Warp warp(kValuesAt + kValueTile.bytes());
  put_tile(warp.memory, 0, kQueryTile, q);
  put_tile(warp.memory, kKeysAt, kKeyTile, k);
  put_tile(warp.memory, kValuesAt, kValueTile, v);

  struct ScoresOf {
    Scores x;
  };
  struct OutputsOf {
    Outputs x;
  };
  std::vector<ScoresOf> scores(kWarp);
  std::vector<OutputsOf> outputs(kWarp);
  warp.run(
      [&](int lane) {
        const std::size_t own = static_cast<std::size_t>(lane);
        multiply_rows<kQueryTile, kKeyTile>(scores[own].x, 0, kWarpOfTest * kWarpRows, kKeysAt);
        Scores weights;
        for (int t = 0; t < kRowTiles; ++t)
          for (int n = 0; n < kKeyTiles; ++n)
            for (int i = 0; i < 4; ++i)
              weights[t][n][i] = p.at(16 * t + i / 2 * 8 + lane / 4, 8 * n + lane % 4 * 2 + i % 2);
        Outputs& o = outputs[own].x;
        for (auto& tiles : o)
          for (auto& tile : tiles) std::fill_n(tile, 4, 0.f);
        add_product<kValueTile>(o, weights, kValuesAt);
      },
      kWarpOfTest * kWarp);

  EXPECT_EQ(warp.most_conflicts, 1);
  expect_accumulators(scores, kRowTiles, kKeyTiles, tolerance, [&](int row, int key) {
    Sum sum;
    for (int c = 0; c < kHeadDim; ++c) sum.add(q.at(kWarpOfTest * kWarpRows + row, c), k.at(key, c));
    return sum;
  });
  expect_accumulators(outputs, kRowTiles, kValueTiles, tolerance, [&](int row, int column) {
    Sum sum;
    for (int key = 0; key < kBlockKeys; ++key) sum.add(p.at(row, key), v.at(key, column));
    return sum;
  });
}
