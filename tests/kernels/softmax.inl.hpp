// Included in the namespace of device text with its constants: the softmax of a lane's rows against long double, tile by tile.
// The lanes of a quad hold equal scores here, so that each counts four times.

using ::narrows::test::kNegInf, ::narrows::test::kNan;

struct RowScores {
  std::vector<float> x;  // whole tiles
  RowResult result{};
  std::vector<float> weights;  // each a tile's, when the last tile's reference was known
};

constexpr int kTileKeys = 2 * kKeyTiles;  // of one lane

inline float& score(Scores& s, int r, int key) { return s[r / 2][key / 2][r % 2 * 2 + key % 2]; }

/// The rows, side by side as a lane has them.
inline void attend_rows(std::vector<RowScores>& rows, const Units<float>& units, const TensorArg& sinks = {}) {
  Softmax softmax;
  for (RowScores& row : rows) row.weights.clear();
  for (std::size_t first = 0; first < rows[0].x.size(); first += kTileKeys) {
    Scores s;
    for (int r = 0; r < kRows; ++r)
      for (int key = 0; key < kTileKeys; ++key)
        score(s, r, key) = rows[static_cast<std::size_t>(r)].x[first + static_cast<std::size_t>(key)] * units.sign;
    for (int r = 0; r < kRows; ++r)
      for (int key = 0; key < kTileKeys; ++key)
        if (rows[static_cast<std::size_t>(r)].x[first + static_cast<std::size_t>(key)] == kNegInf)
          score(s, r, key) = kHidden;
    float factor[kRows], subtrahend[kRows];
    raise_reference(softmax, s, factor, subtrahend, units);
    weigh(softmax, s, subtrahend, units);
    for (int r = 0; r < kRows; ++r) {
      std::vector<float>& weights = rows[static_cast<std::size_t>(r)].weights;
      for (float& weight : weights) weight *= factor[r];
      for (int key = 0; key < kTileKeys; ++key) weights.push_back(score(s, r, key));
    }
  }
  for (int r = 0; r < kRows; ++r)
    rows[static_cast<std::size_t>(r)].result =
        row_result(units, softmax.maximum[r], quad_sum(softmax.sum[r]), sinks, 0);
}

/// c is the fp32 number that the contract names; everything else is exact.
inline void expect_exact(const Units<float>& units, const RowScores& row) {
  const auto exponent = [&](float s) {
    return s == kNegInf ? static_cast<long double>(kNegInf) : static_cast<long double>(s) * units.sign * units.c;
  };
  long double largest = static_cast<long double>(kNegInf), sum = 0;
  for (const float s : row.x) largest = std::max(largest, exponent(s));
  if (largest == static_cast<long double>(kNegInf)) {
    ASSERT_EQ(row.result.lse, kNegInf);
    ASSERT_EQ(row.result.factor, 0.f);
    for (const float weight : row.weights) ASSERT_EQ(weight, 0.f);
    return;
  }
  for (const float s : row.x) sum += 4 * std::exp2(exponent(s) - largest);
  for (std::size_t j = 0; j < row.x.size(); ++j)
    ASSERT_NEAR(row.weights[j] * row.result.factor, static_cast<double>(std::exp2(exponent(row.x[j]) - largest) / sum),
                1e-6)
        << "score " << row.x[j];
  const double lse = static_cast<double>((largest + std::log2(sum)) * std::log(2.0L));
  ASSERT_NEAR(row.result.lse, lse, 1e-6 + 6e-7 * std::abs(lse));
}

/// Exponents of the row's scores: about 0, 2^24 crossed upwards or downwards between tiles or within one, far beyond, huge.
class RandomRows {
 public:
  explicit RandomRows(const Units<float>& units, unsigned seed) : units_(units), random_(seed) {}

  RowScores next(int tiles) {
    RowScores row;
    const std::size_t kind = below(8), keys = static_cast<std::size_t>(tiles * kTileKeys);
    const double size = std::array{0., 1., 1.6777216e7, 1.6e7, 8.4e6, 2.3e8, 3.3e12, 1e30}[kind];
    const double way = below(2) == 0 ? 1 : -1, slope = size == 1e30 ? 0 : std::array{0., 5., -5., 3e5}[below(4)];
    for (std::size_t j = 0; j < keys; ++j) {
      const double away = static_cast<double>(j) - static_cast<double>(keys) / 2;
      const double exponent = size * way + slope * away + normal_(random_) * (size > 1e9 ? size * 1e-7 : 4);
      row.x.push_back(static_cast<float>(exponent / (units_.c * (units_.sign == 0 ? 1 : units_.sign))));
    }
    hide(row.x);
    return row;
  }

 private:
  std::size_t below(std::size_t n) { return std::uniform_int_distribution<std::size_t>(0, n - 1)(random_); }

  /// Single keys, whole tiles from either end, or all.
  void hide(std::vector<float>& x) {
    const std::size_t kind = below(6);
    if (kind == 0) std::fill(x.begin(), x.end(), kNegInf);
    if (kind == 1) std::fill(x.begin(), x.begin() + kTileKeys + 3, kNegInf);
    if (kind == 2) std::fill(x.end() - kTileKeys - 1, x.end(), kNegInf);
    if (kind == 3)
      for (float& score : x)
        if (below(3) == 0) score = kNegInf;
  }

  Units<float> units_;
  std::mt19937 random_;
  std::normal_distribution<double> normal_;
};

inline void expect_random_rows(const Units<float>& units, unsigned seed, int repeats) {
  RandomRows random(units, seed);
  for (int repeat = 0; repeat < repeats; ++repeat) {
    const int tiles = 2 + repeat % 4;
    std::vector<RowScores> rows;
    for (int r = 0; r < kRows; ++r) rows.push_back(random.next(tiles));
    attend_rows(rows, units);
    for (const RowScores& row : rows) ASSERT_NO_FATAL_FAILURE(expect_exact(units, row)) << repeat;
  }
}

/// What a row's neighbours hold, and so whether the warp looks closer, changes none of its bits.
inline void expect_alone_as_together(const Units<float>& units) {
  RandomRows random(units, 21);
  for (int repeat = 0; repeat < 2000; ++repeat) {
    std::vector<RowScores> rows;
    for (int r = 0; r < kRows; ++r) rows.push_back(random.next(3));
    attend_rows(rows, units);
    for (const RowScores& row : rows) {
      std::vector<RowScores> alone(kRows, row);
      attend_rows(alone, units);
      for (const RowScores& same : alone) {
        ASSERT_EQ(same.weights, row.weights);
        ASSERT_EQ(same.result.lse, row.result.lse);
        ASSERT_EQ(same.result.factor, row.result.factor);
      }
    }
  }
}

/// Of one tile's rows the first has a NaN.
inline void expect_nan_stays(const Units<float>& units) {
  RandomRows random(units, 22);
  for (int repeat = 0; repeat < 200; ++repeat) {
    std::vector<RowScores> rows;
    for (int r = 0; r < kRows; ++r) rows.push_back(random.next(3));
    rows[0].x[static_cast<std::size_t>(repeat % (3 * kTileKeys))] = kNan;
    attend_rows(rows, units);
    ASSERT_TRUE(std::isnan(rows[0].result.lse)) << repeat;
    for (std::size_t r = 1; r < kRows; ++r) ASSERT_NO_FATAL_FAILURE(expect_exact(units, rows[r]));
  }
}

/// A sink is one more logit.
inline void expect_sinks(const Units<float>& units) {
  RandomRows random(units, 23);
  for (const float sink : {0.f, 3.f, -40.f, 1e5f, 1.5e7f, -1.5e7f, 1e30f, kNegInf})
    for (int repeat = 0; repeat < 300; ++repeat) {
      TensorArg sinks;
      std::array<float, 1> value{sink};
      sinks.data = reinterpret_cast<char*>(value.data());
      std::vector<RowScores> rows, without;
      for (int r = 0; r < kRows; ++r) rows.push_back(random.next(2));
      without = rows;
      attend_rows(rows, units, sinks);
      attend_rows(without, units);
      for (std::size_t r = 0; r < kRows; ++r) {
        const double lse = without[r].result.lse, most = std::max<double>(lse, sink);
        const double merged = most + std::log1p(std::exp(std::min<double>(lse, sink) - most));
        // Of large logits only fp32's digits are known, here as in the LSE that they make.
        const double unsure =
            1e-5 + 3e-7 * std::max(std::isinf(lse) ? 0 : std::abs(lse), std::abs(std::isinf(sink) ? 0. : sink));
        if (std::isinf(lse)) {
          ASSERT_EQ(rows[r].result.lse, sink);
          ASSERT_EQ(rows[r].result.factor, 0.f);
          continue;
        }
        ASSERT_NEAR(rows[r].result.lse, merged, unsure) << sink << " " << lse;
        if (unsure > 1e-3) continue;
        ASSERT_NEAR(rows[r].result.factor / without[r].result.factor, std::exp(lse - merged), 2e-3);
      }
    }
}
