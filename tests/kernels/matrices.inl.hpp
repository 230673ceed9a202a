// Included in the namespace of device text with its constants: matrices, their tiles in shared memory, and what lanes hold of them.
struct Matrix {
  int rows, columns;
  std::vector<float> x;

  Matrix(int rows_, int columns_) : rows(rows_), columns(columns_), x(static_cast<std::size_t>(rows_ * columns_)) {}
  float& at(int row, int column) { return x[static_cast<std::size_t>(row * columns + column)]; }
  float at(int row, int column) const { return x[static_cast<std::size_t>(row * columns + column)]; }
  template <class Draw> void fill(const Draw& draw) {
    for (float& value : x) value = draw();
  }
};

inline void put_element(std::vector<unsigned char>& memory, u32 at, float x) {
  if constexpr (kElement == Element::fp32) {
    std::memcpy(&memory.at(at), &x, 4);
  } else {
    const unsigned short half = static_cast<unsigned short>(pack(x, 0.f));
    std::memcpy(&memory.at(at), &half, 2);
  }
}

/// As copies leave it.
inline void put_tile(std::vector<unsigned char>& memory, u32 start, const SmemTile& tile, const Matrix& from) {
  for (int row = 0; row < from.rows; ++row)
    for (int column = 0; column < from.columns; ++column) {
      const int byte = column * kElementBytes;
      put_element(memory, start + tile.offset(row, byte / kUnitBytes) + static_cast<u32>(byte % kUnitBytes),
                  from.at(row, column));
    }
}

/// expected(row, column) and magnitude(row, column) of the warp's rows, against accumulators that a lane left.
template <class Accumulators, class Expected>
void expect_accumulators(const std::vector<Accumulators>& lanes, int row_tiles, int column_tiles, double tolerance,
                         const Expected& expected) {
  for (int lane = 0; lane < kWarp; ++lane)
    for (int t = 0; t < row_tiles; ++t)
      for (int n = 0; n < column_tiles; ++n)
        for (int i = 0; i < 4; ++i) {
          const int row = 16 * t + i / 2 * 8 + lane / 4, column = 8 * n + lane % 4 * 2 + i % 2;
          const auto [value, magnitude] = expected(row, column);
          ASSERT_NEAR(lanes[static_cast<std::size_t>(lane)].x[t][n][i], value, tolerance * magnitude)
              << "row " << row << ", column " << column;
        }
}

struct Sum {
  double value = 0, magnitude = 0;
  void add(double a, double b) { value += a * b, magnitude += std::abs(a * b); }
};
