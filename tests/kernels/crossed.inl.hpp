// Included in the namespace of device text with its element: sums over the rows of tiles in shared memory, as the backward pass
// makes them, and how warps share a tile's columns.
#include "tests/kernels/matrices.inl.hpp"

constexpr float kBefore = 3;  // in every accumulator

template <int R, int C> struct Accumulators {
  float x[R][C][4];
  Accumulators() {
    for (auto& row : x)
      for (auto& tile : row) std::fill_n(tile, 4, kBefore);
  }
};

/// Two tiles in a warp's memory.
template <SmemTile left, SmemTile right, int warps> struct Operands {
  using Part = ColumnPart<right, warps>;

  Matrix a{left.rows, left.row_bytes / kElementBytes}, b{right.rows, right.row_bytes / kElementBytes};
  ::narrows::test::Warp warp{static_cast<std::size_t>(left.bytes() + right.bytes())};

  template <class Draw> explicit Operands(const Draw& draw) {
    a.fill(draw);
    b.fill(draw);
    put_tile(warp.memory, 0, left, a);
    put_tile(warp.memory, left.bytes(), right, b);
  }
  /// Calls body(part, the column of each of its own).
  template <class Body> static void each_part(const Body& body) {
    for (int w = 0; w < warps; ++w) {
      const Part part(w);
      if (!part.exists()) continue;
      SCOPED_TRACE(testing::Message() << "part " << w << " of " << warps << ", rows of " << right.row_bytes
                                      << " bytes");
      body(part, [&](int j) { return (part.first + Part::away(j / 8)) / kElementBytes + j % 8; });
    }
  }
};

/// add_crossed: R * 16 columns of `left`, from each that a warp may begin with.
template <SmemTile left, SmemTile right, int warps, int R, class Draw>
void expect_crossed(const Draw& draw, double tolerance, int conflicts = 1) {
  using Both = Operands<left, right, warps>;
  Both both(draw);
  for (int first = 0; first < both.a.columns; first += 16 * R)
    Both::each_part([&](const auto& part, const auto& column) {
      std::vector<Accumulators<R, Both::Part::tiles>> sums(kWarp);
      both.warp.run([&](int lane) {
        add_crossed<left>(sums[static_cast<std::size_t>(lane)].x, 0, first * kElementBytes / kUnitBytes, left.bytes(),
                          part);
      });
      expect_accumulators(sums, R, Both::Part::tiles, tolerance, [&](int i, int j) {
        Sum sum;
        sum.add(kBefore, 1);
        for (int row = 0; row < left.rows; ++row) sum.add(both.a.at(row, first + i), both.b.at(row, column(j)));
        return sum;
      });
    });
  EXPECT_EQ(both.warp.most_conflicts, conflicts);
}

/// add_rows: R * 16 rows of `left`, from each that a warp may begin with.
template <SmemTile left, SmemTile right, int warps, int R, class Draw>
void expect_rows(const Draw& draw, double tolerance) {
  using Both = Operands<left, right, warps>;
  Both both(draw);
  for (int first = 0; first < left.rows; first += 16 * R)
    Both::each_part([&](const auto& part, const auto& column) {
      std::vector<Accumulators<R, Both::Part::tiles>> sums(kWarp);
      std::vector<int> between;  // of lane 0
      both.warp.run([&](int lane) {
        add_rows<left>(sums[static_cast<std::size_t>(lane)].x, 0, first, left.bytes(), part, [&](int n) {
          if (lane == 0) between.push_back(n);
        });
      });
      ASSERT_EQ(between.size(), static_cast<std::size_t>(right.rows / kDepth));
      for (std::size_t n = 0; n < between.size(); ++n) ASSERT_EQ(between[n], static_cast<int>(n));
      expect_accumulators(sums, R, Both::Part::tiles, tolerance, [&](int i, int j) {
        Sum sum;
        sum.add(kBefore, 1);
        for (int row = 0; row < right.rows; ++row) sum.add(both.a.at(first + i, row), both.b.at(row, column(j)));
        return sum;
      });
    });
  EXPECT_EQ(both.warp.most_conflicts, 1);
}

/// Every column of the tile is one part's, and is found where the tile has it.
template <int rows, int width, int warps> void expect_parts() {
  constexpr SmemTile tile{rows, width * kElementBytes};
  constexpr u32 kStart = 4096;
  if constexpr (tile.row_bytes >= 32 * warps) {  // as the planner widens head dims
    SCOPED_TRACE(testing::Message() << warps << " warps, " << width << " columns, " << rows << " rows");
    using Part = ColumnPart<tile, warps>;
    ASSERT_EQ(Part::tiles * 8 * kElementBytes, Part::bytes);
    std::vector<int> owners(width);
    for (int w = 0; w < warps; ++w) {
      const Part part(w);
      ASSERT_EQ(part.exists(), part.first < tile.row_bytes);
      if (!part.exists()) continue;
      for (int unit = 0; unit < Part::bytes / kUnitBytes; ++unit) {
        const int n = unit * kUnitBytes / (8 * kElementBytes), within = unit * kUnitBytes % (8 * kElementBytes);
        const int byte = part.first + Part::away(n) + within;
        ASSERT_LT(byte, tile.row_bytes);
        for (int x = 0; x < kUnitBytes / kElementBytes; ++x)
          ++owners[static_cast<std::size_t>(byte / kElementBytes + x)];
        for (int row = 0; row < rows; ++row) {
          // Lanes begin in unit 0 or 1 of a part and go on by two.
          const UnitAddress<tile> address(part.start(kStart), row % 8, part.unit() + unit % 2);
          const int pair = unit / 2 * 2 * kUnitBytes / (8 * kElementBytes);
          ASSERT_EQ(address.at(Part::units_away(pair), row / 8 * 8), kStart + tile.offset(row, byte / kUnitBytes));
        }
      }
    }
    for (int column = 0; column < width; ++column)
      ASSERT_EQ(owners[static_cast<std::size_t>(column)], 1) << "column " << column;
  }
}

template <int rows, int width> void expect_parts_of_width() {
  expect_parts<rows, width, 1>();
  expect_parts<rows, width, 2>();
  expect_parts<rows, width, 4>();
  expect_parts<rows, width, 8>();
}

/// Tiles of keys and of queries, of every width that is planned.
template <int rows> void expect_parts_of_every_width() {
  expect_parts_of_width<rows, 32>();
  expect_parts_of_width<rows, 64>();
  expect_parts_of_width<rows, 96>();
  expect_parts_of_width<rows, 128>();
  expect_parts_of_width<rows, 192>();
  expect_parts_of_width<rows, 256>();
  expect_parts_of_width<rows, 512>();
  expect_parts_of_width<rows, 576>();
  // Where a warp takes its part of dQ in passes.
  expect_parts<rows, 512, 16>();
  expect_parts<rows, 576, 12>();
}
