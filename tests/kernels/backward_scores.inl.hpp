// Included in the namespace of device text with its constants: scores on their way to P^T and dS^T, each warp of a thread block by
// itself, against plain formulas in double.

using ::narrows::test::kNegInf, ::narrows::test::kNan;

constexpr i32 kSequence = 2, kHead = 3, kFirstRow = 2 * kBlockQueries;
constexpr u32 kFactsAt = 0, kSeenAt = kFactsAt + kBlockQueries * sizeof(RowFacts),
              kTileAt = (kSeenAt + kBlockQueries * sizeof(Keys) + 127) / 128 * 128;

/// Of each pair of a query and a key of the step.
template <class T> struct Pairs {
  std::vector<T> x = std::vector<T>(kBlockQueries * kBlockKeys);
  T& at(i32 query, i32 key) { return x[static_cast<std::size_t>(query * kBlockKeys + key)]; }
  const T& at(i32 query, i32 key) const { return x[static_cast<std::size_t>(query * kBlockKeys + key)]; }
};

/// Calls body(query, key).
template <class Body> void each_pair(const Body& body) {
  for (i32 query = 0; query < kBlockQueries; ++query)
    for (i32 key = 0; key < kBlockKeys; ++key) body(query, key);
}

/// Where accumulator i of tiles (t, j) of a warp's lane lies, by the layout of the products alone.
struct PlaceOfTest {
  i32 query, key;
  PlaceOfTest(int warp, int lane, int t, int j, int i)
      : query(warp % kColumnWarps * kWarpQueries + 8 * j + lane % 4 * 2 + i % 2),
        key(warp / kColumnWarps * 16 * kRowTiles + 16 * t + i / 2 * 8 + lane / 4) {}
};

/// A step: kBlockQueries rows from row kFirstRow on, kBlockKeys keys from block.first on; some of both do not exist.
struct StepOfTest {
  std::mt19937 random;
  BackwardArgs args;
  KeyBlock block{};
  ::narrows::test::Warp warp{kTileAt + kScoreTile.bytes()};
  std::vector<RowFacts> facts = std::vector<RowFacts>(kBlockQueries);
  std::vector<Keys> seen = std::vector<Keys>(kBlockQueries);

  explicit StepOfTest(unsigned seed) : random(seed) {
    args.batch = 4, args.heads = 5;
    block.sequence = kSequence;
    block.first = 5 * kBlockKeys;
    block.keys = block.first + kBlockKeys - 3;
    block.queries = kFirstRow + kBlockQueries - 5;
    block.first_query = 7;
    block.shift = 11;
  }
  float normal(double deviation = 1) {
    return static_cast<float>(std::normal_distribution<double>(0, deviation)(random));
  }
  i32 between(i32 low, i32 high) { return std::uniform_int_distribution<i32>(low, high)(random); }
  Pairs<float> draw(double deviation = 1) {
    Pairs<float> pairs;
    for (float& x : pairs.x) x = normal(deviation);
    return pairs;
  }
  void put_rows() {
    std::memcpy(&warp.memory[kFactsAt], facts.data(), facts.size() * sizeof(RowFacts));
    std::memcpy(&warp.memory[kSeenAt], seen.data(), seen.size() * sizeof(Keys));
  }

  /// body(scores) of each warp that makes scores; then what its lanes hold.
  template <class Body> Pairs<float> run(const Pairs<float>& from, const Body& body) {
    Pairs<float> to;
    for (float& x : to.x) x = kNan;
    for (int w = 0; w < kWarps; ++w) {
      if (w % kColumnWarps >= kScoreWarps) continue;
      const auto each = [&](int lane, Scores& s, const auto& move) {
        for (int t = 0; t < kRowTiles; ++t)
          for (int j = 0; j < kQueryTiles; ++j)
            for (int i = 0; i < 4; ++i) {
              const PlaceOfTest place(w, lane, t, j, i);
              move(s[t][j][i], place.query, place.key);
            }
      };
      warp.run(
          [&](int lane) {
            Scores s;
            each(lane, s, [&](float& x, i32 query, i32 key) { x = from.at(query, key); });
            body(s);
            each(lane, s, [&](float& x, i32 query, i32 key) { to.at(query, key) = x; });
          },
          static_cast<unsigned>(w * kWarp));
    }
    return to;
  }
};

/// What is expected, and what it may be off by. NaN stands for NaN.
struct Near {
  double value, off;
};
template <class Expected> void expect_pairs(const Pairs<float>& got, const Expected& expected) {
  each_pair([&](i32 query, i32 key) {
    const Near near = expected(query, key);
    const float x = got.at(query, key);
    SCOPED_TRACE(testing::Message() << "query " << query << ", key " << key);
    if (std::isnan(near.value))
      ASSERT_TRUE(std::isnan(x)) << x;
    else if (near.off == 0)
      ASSERT_EQ(x, static_cast<float>(near.value));
    else
      ASSERT_NEAR(x, near.value, near.off);
  });
}

/// Elements of a bias or a mask, and no byte more than those that exist.
template <class T> struct Elements {
  std::vector<T> x;
  TensorArg arg;
  i64 row_stride, key_stride;

  Elements(const KeyBlock& block, i64 row_stride_, i64 key_stride_) : row_stride(row_stride_), key_stride(key_stride_) {
    x.resize(static_cast<std::size_t>(index(block.queries - 1, block.keys - 1) + 1));
    arg.data = reinterpret_cast<char*>(x.data());
    const i64 strides[]{kSequenceStride, kHeadStride, row_stride, key_stride};
    for (int axis = 0; axis < 4; ++axis) arg.strides[axis] = strides[axis] * static_cast<i64>(sizeof(T));
  }
  i64 index(i64 row, i64 key) const {
    return kSequence * kSequenceStride + kHead * kHeadStride + row * row_stride + key * key_stride;
  }
  T at(i64 row, i64 key) const { return x[static_cast<std::size_t>(index(row, key))]; }

 private:
  static constexpr i64 kSequenceStride = 3, kHeadStride = 1;
};

inline void expect_scores_cover_the_tile() {
  Pairs<int> owners;
  StepOfTest step(1);
  for (int w = 0; w < kWarps; ++w) {
    if (w % kColumnWarps >= kScoreWarps) continue;
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      threadIdx = {nullptr, static_cast<unsigned>(w * kWarp) + lane};
      const LanePlace place;
      Scores s{};
      each_score(s, [&](int r, int j, int e, float& x) {
        ++owners.at(place.query(j, e), place.key(r));
        ++x;
        const PlaceOfTest test(w, static_cast<int>(lane), r / 2, j, r % 2 * 2 + e);
        ASSERT_EQ(place.query(j, e), test.query);
        ASSERT_EQ(place.key(r), test.key);
      });
      for (const auto& row : s)
        for (const auto& tile : row)
          for (const float x : tile) ASSERT_EQ(x, 1.f);
    }
  }
  threadIdx = {};
  each_pair([&](i32 query, i32 key) { ASSERT_EQ(owners.at(query, key), 1) << query << " " << key; });
}

/// Sums of dQ lie at places of their own: all of a block's, in either order.
inline void expect_sums_have_places() {
  std::vector<int> owners(kSumsOfBlock);
  for (int row_tile = 0; row_tile < kBlockQueries / 16; ++row_tile)
    for (int column_tile = 0; column_tile < kHeadDim / 8; ++column_tile)
      for (int lane = 0; lane < kWarp; ++lane)
        for (int i = 0; i < 4; ++i) {
          const int place = sum_place(row_tile, column_tile, lane, i);
          ASSERT_EQ(place, sum_place(row_tile, column_tile, lane, 0) + i * (kVectorSums ? 1 : kWarp));
          ASSERT_LT(place, kSumsOfBlock);
          ++owners.at(static_cast<std::size_t>(place));
        }
  for (const int count : owners) ASSERT_EQ(count, 1);
}

inline void expect_unseen_are_hidden() {
  for (unsigned seed = 0; seed < 6; ++seed) {
    StepOfTest step(seed);
    for (Keys& keys : step.seen) {
      keys.begin = step.block.first + step.between(-kBlockKeys, kBlockKeys);
      keys.end = keys.begin + step.between(0, 2 * kBlockKeys);
      if (step.between(0, 7) == 0) keys = {0, 0};
      if (step.between(0, 7) == 0) keys = {0, 0x7fffffff};
    }
    step.put_rows();
    const Pairs<float> from = step.draw();
    const Pairs<float> got = step.run(from, [&](Scores& s) { hide_unseen(s, kSeenAt, step.block.first); });
    expect_pairs(got, [&](i32 query, i32 key) -> Near {
      const Keys keys = step.seen[static_cast<std::size_t>(query)];
      const i32 j = step.block.first + key;
      return {keys.begin <= j && j < keys.end ? from.at(query, key) : kNegInf, 0};
    });
  }
}

/// What the mask forbids, and what it has no element for.
inline void expect_masked_are_hidden() {
  StepOfTest step(3);
  Elements<unsigned char> mask(step.block, 4 * step.block.keys, 3);
  for (unsigned char& x : mask.x) x = static_cast<unsigned char>(step.between(0, 2));
  step.args.mask = mask.arg;
  const Pairs<float> from = step.draw();
  const Pairs<float> got = step.run(from, [&](Scores& s) { hide_masked(s, step.args, step.block, kHead, kFirstRow); });
  expect_pairs(got, [&](i32 query, i32 key) -> Near {
    const i32 row = kFirstRow + query, j = step.block.first + key;
    const bool kept = row < step.block.queries && j < step.block.keys && mask.at(row, j) != 0;
    return {kept ? from.at(query, key) : kNegInf, 0};
  });
}

inline void expect_gradient_of_probabilities() {
  StepOfTest step(4);
  for (RowFacts& facts : step.facts) facts = {kNan, step.normal()};
  step.put_rows();
  const Pairs<float> from = step.draw();
  Pairs<float> weights;
  for (float& x : weights.x) x = static_cast<float>(step.between(0, 999)) / 1000;
  // Each lane brings its own weights to the gradients.
  const Pairs<float> got = step.run(from, [&](Scores& g) {
    const LanePlace place;
    Scores p;
    each_score(p, [&](int r, int j, int e, float& x) { x = weights.at(place.query(j, e), place.key(r)); });
    differentiate(g, p, kFactsAt);
  });
  expect_pairs(got, [&](i32 query, i32 key) -> Near {
    const double delta = step.facts[static_cast<std::size_t>(query)].delta, p = weights.at(query, key);
    return {p * (from.at(query, key) - delta), 1e-6 * p * (std::abs(from.at(query, key)) + std::abs(delta)) + 1e-30};
  });
}

inline void expect_slopes() {
  StepOfTest step(5);
  const Pairs<float> from = step.draw();
  std::vector<float> slopes(kThreads);
  step.run(from, [&](Scores& g) { slopes[threadIdx.x] = slope_of(g, step.block, kFirstRow); });
  double sum = 0, expected = 0, size = 0;
  for (const float slope : slopes) sum += slope;
  each_pair([&](i32 query, i32 key) {
    const i64 away = i64{kFirstRow} + query + step.block.shift - step.block.first - key;
    expected -= static_cast<double>(away < 0 ? -away : away) * from.at(query, key);
    size += std::abs(static_cast<double>(away) * from.at(query, key));
  });
  EXPECT_NEAR(sum, expected, 1e-6 * size);
}

/// Tiles of scores as the products read them.
inline void expect_stored_scores() {
  StepOfTest step(6);
  Pairs<float> from;
  for (float& x : from.x) x = static_cast<float>(step.between(-120, 120));
  step.run(from, [&](Scores& s) { store_scores(kTileAt, s); });
  each_pair([&](i32 query, i32 key) {
    const int byte = query * kElementBytes;
    const u32 at = kTileAt + kScoreTile.offset(key, byte / kUnitBytes) + static_cast<u32>(byte % kUnitBytes);
    ASSERT_EQ(load_element(reinterpret_cast<const char*>(&step.warp.memory[at]), kElement), from.at(query, key))
        << "query " << query << ", key " << key;
  });
}

inline void expect_dropout() {
  for (const i64 origin_key : {i64{0}, i64{8}, i64{3}, (i64{1} << 34) - 5}) {
    SCOPED_TRACE(origin_key);
    StepOfTest step(7);
    DropoutRule rule;
    rule.seed = 0x123456789abcdefu;
    rule.offset = 17;
    rule.threshold = keep_threshold(0.4);
    rule.origin_batch = 1, rule.origin_head = 2, rule.origin_row = 1000, rule.origin_key = origin_key;
    rule.heads = 9;
    const Pairs<float> from = step.draw();
    const Pairs<float> got = step.run(from, [&](Scores& s) {
      const Kept kept(rule, kSequence, kHead, kFirstRow, step.block.first);
      drop(s, kept, 1.5f);
    });
    int count = 0;
    expect_pairs(got, [&](i32 query, i32 key) -> Near {
      const i64 row = kFirstRow + query, j = step.block.first + key;
      const bool keeps = kept(rule, kSequence, kHead, row, j);
      EXPECT_EQ((keep_bits8(rule, kSequence, kHead, row, j / 8 * 8) >> j % 8 & 1u) != 0, keeps);
      count += keeps;
      return {keeps ? 1.5f * from.at(query, key) : 0.f, 0};
    });
    EXPECT_NEAR(count / static_cast<double>(from.x.size()), 0.6, 0.1);
  }
}
