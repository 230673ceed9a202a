// A step of the backward kernels as one warp makes it: what it loads and what its rows see, P^T and the gradient of the logits,
// against plain sums in double. Whatever no row of the step sees is NaN.
#include <gtest/gtest.h>

#include <random>

#include "tests/kernels/device/device.hpp"
#include "tests/shared/std_math.hpp"

namespace backward_step {
#include "shared/backward_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::fp32, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 32, kValueDim = 32, kBlockQueries = 32, kBlockKeys = 16, kWarps = 1,
                               kColumnWarps = 1, kThreads = 32, kStages = 2, kCopyBytes = 16;
[[maybe_unused]] constexpr bool kNatural = false, kSoftcap = false, kAlibi = false, kBias = false, kMask = true,
                                kDropout = true, kVectorSums = false, kDeterministic = false;
}  // namespace narrows

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wconversion"  // sizes of 64 bits, which the device has none of
#include "kernels/backward_step.cuh"
#pragma GCC diagnostic pop

namespace narrows {

using ::narrows::test::kNan;

constexpr i32 kHeads = 4, kGroup = 2, kHeadColumns = 28, kValueColumns = 32, kRowsOfTest = 77, kKeysOfTest = 45;
constexpr double kScaleOfTest = 0.4;

/// (s, h, d) of one sequence.
struct TensorRows {
  std::vector<float> x;
  i32 heads, columns;
  TensorRows(i32 rows, i32 heads_, i32 columns_)
      : x(static_cast<std::size_t>(rows * heads_ * columns_)), heads(heads_), columns(columns_) {}
  float& at(i32 row, i32 head, i32 column) {
    return x[static_cast<std::size_t>((row * heads + head) * columns + column)];
  }
  TensorArg arg() {
    return {reinterpret_cast<char*>(x.data()), {0, 4 * heads * columns, 4 * columns, 4}, Element::fp32};
  }
};

struct StepOfTest {
  std::mt19937 random;
  TensorRows q{kRowsOfTest, kHeads, kHeadColumns}, k{kKeysOfTest, kHeads / kGroup, kHeadColumns};
  TensorRows v{kKeysOfTest, kHeads / kGroup, kValueColumns}, dout{kRowsOfTest, kHeads, kValueColumns};
  std::vector<unsigned char> mask = std::vector<unsigned char>(kRowsOfTest * kKeysOfTest);
  std::vector<i32> ends = std::vector<i32>(kRowsOfTest);
  std::vector<RowFacts> facts;
  std::vector<float> lse = std::vector<float>(kRowsOfTest * kHeads);
  BackwardArgs args;
  KeyBlock block{};
  Place place{};
  i32 keys, queries;

  i32 between(i32 low, i32 high) { return std::uniform_int_distribution<i32>(low, high)(random); }

  explicit StepOfTest(unsigned seed) : random(seed), keys(between(1, kKeysOfTest)), queries(between(1, kRowsOfTest)) {
    std::normal_distribution<float> normal;
    for (TensorRows* rows : {&q, &k, &v, &dout})
      for (float& x : rows->x) x = normal(random);
    for (unsigned char& x : mask) x = static_cast<unsigned char>(between(0, 5));
    const i32 most = between(0, 2 * kKeysOfTest);
    for (i32& end : ends) end = between(-3, most);
    args.q = q.arg(), args.k = k.arg(), args.v = v.arg(), args.dout = dout.arg();
    args.batch = 1, args.heads = kHeads, args.kv_heads = kHeads / kGroup, args.group = kGroup;
    args.head_dim = kHeadColumns, args.value_dim = kValueColumns;
    args.query_rows = kRowsOfTest, args.key_rows = kKeysOfTest, args.score_rows = args.score_keys = 1 << 20;
    args.query_blocks = ceil_div(kRowsOfTest, kBlockQueries), args.key_blocks = ceil_div(kKeysOfTest, kBlockKeys);
    args.mask = {reinterpret_cast<char*>(mask.data()), {0, 0, kKeysOfTest, 1}, Element::fp32};
    if (between(0, 2) == 0) args.key_end = {ends.data(), 0, 1};
    args.seqused_q = {&queries, 1}, args.seqused_k = {&keys, 1};
    args.visibility = make_mask(between(0, 1) ? between(0, 40) : -1, -1, between(0, 1) != 0, 0);
    args.units = fused_units<float>(kScaleOfTest);
    args.dropout.threshold = keep_threshold(0.3);
    args.dropout.origin_key = between(0, 9);
    args.seed.value = 1234567 + seed, args.offset.value = 5;
    for (i32 n = 0; n < kHeads * args.query_blocks * kBlockQueries; ++n)
      facts.push_back({normal(random), normal(random)});
    args.rows = facts.data();
    for (float& x : lse) x = 3e7f;  // no row's: the call's rows are near
    args.lse = {reinterpret_cast<char*>(lse.data()), {0, 4 * kRowsOfTest, 4, 0}, Element::fp32};
  }

  /// A key block and a query block that it visits; false: there is none.
  bool choose() {
    block = find_key_block(args, static_cast<u32>(between(0, args.key_blocks * args.kv_heads - 1)));
    if (block.begin_tile >= block.end_tile) return false;
    place = {block.kv_head * kGroup + between(0, kGroup - 1), between(block.begin_tile, block.end_tile - 1)};
    return true;
  }
  i32 row(i32 query) const { return place.tile * kBlockQueries + query; }
  bool exists(i32 query, i32 key) const { return row(query) < queries && block.first + key < keys; }
  /// By all but the mask tensor.
  bool sees(i32 query, i32 key) const {
    if (!exists(query, key)) return false;
    if (args.key_end.data && block.first + key >= ends[static_cast<std::size_t>(row(query))]) return false;
    return visible(args.visibility, row(query) + block.shift, block.first + key, keys);
  }
  /// Rows that see no key of the block, and keys that do not exist, hold NaN.
  void poison() {
    for (i32 i = 0; i < kRowsOfTest; ++i) {
      if (block.seeing.begin <= i && i < block.seeing.end) continue;
      for (i32 c = 0; c < kHeadColumns; ++c) q.at(i, place.head, c) = kNan;
      for (i32 c = 0; c < kValueColumns; ++c) dout.at(i, place.head, c) = kNan;
    }
    for (i32 j = keys; j < kKeysOfTest; ++j)
      for (i32 c = 0; c < kHeadColumns; ++c) k.at(j, block.kv_head, c) = kNan;
  }
};

struct Lanes {
  Scores p, g;
};

void expect_step(StepOfTest& step, const std::vector<Lanes>& lanes) {
  const double factor = keep_factor<double>(step.args.dropout);
  const DropoutRule rule = dropout_rule(step.args);
  for (int lane = 0; lane < kWarp; ++lane)
    for (int t = 0; t < kRowTiles; ++t)
      for (int j = 0; j < kQueryTiles; ++j)
        for (int i = 0; i < 4; ++i) {
          const i32 query = 8 * j + lane % 4 * 2 + i % 2, key = 16 * t + i / 2 * 8 + lane / 4;
          SCOPED_TRACE(testing::Message() << "query " << query << ", key " << key);
          const float p = lanes[static_cast<std::size_t>(lane)].p[t][j][i],
                      g = lanes[static_cast<std::size_t>(lane)].g[t][j][i];
          const i32 row = step.row(query), at = step.block.first + key, head = step.place.head;
          const bool kept_by_mask =
              step.exists(query, key) && step.mask[static_cast<std::size_t>(row * kKeysOfTest + at)] != 0;
          if (!kept_by_mask || !step.sees(query, key)) {
            ASSERT_EQ(p, 0.f);
            ASSERT_EQ(g, 0.f);
            continue;
          }
          double dot = 0, gradient = 0;
          for (i32 c = 0; c < kHeadColumns; ++c)
            dot += static_cast<double>(step.q.at(row, head, c)) * step.k.at(at, step.block.kv_head, c);
          for (i32 c = 0; c < kValueColumns; ++c)
            gradient += static_cast<double>(step.dout.at(row, head, c)) * step.v.at(at, step.block.kv_head, c);
          const RowFacts& facts =
              step.facts[static_cast<std::size_t>(head * step.args.query_blocks * kBlockQueries + row)];
          const double weight =
              std::exp2(std::min(dot * kScaleOfTest * kLog2e - static_cast<double>(facts.reference), 0.));
          const bool keeps = kept(rule, 0, head, row, at);
          ASSERT_NEAR(p, keeps ? weight : 0, 1e-5 * weight);
          ASSERT_NEAR(g, weight * ((keeps ? gradient * factor : 0) - facts.delta), 1e-4 * weight);
        }
}

/// Of the rows that exist and all keys of the block.
Sight expected_sight(const StepOfTest& step) {
  Sight sight{false, false};
  for (i32 query = 0; query < kBlockQueries && step.row(query) < step.queries; ++query)
    for (i32 key = 0; key < kBlockKeys; ++key) {
      sight.any |= step.sees(query, key);
      sight.partial |= !step.sees(query, key);
    }
  return sight;
}

TEST(BackwardStep, finds_what_its_rows_see) {
  for (unsigned seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE(seed);
    StepOfTest step(seed);
    if (!step.choose()) continue;
    ::narrows::test::Warp warp(1 << 16);
    Facts facts{};
    facts.block = step.block;
    const Call call{step.args, facts, 0};
    warp.run([&](int) { look(call, 1, step.place.tile * kBlockQueries); });
    const Sight sight = sight_of(call, 1), expected = expected_sight(step);
    ASSERT_EQ(sight.any, expected.any);
    ASSERT_EQ(sight.partial, expected.partial);
  }
}

TEST(BackwardStep, probabilities_and_gradients) {
  int visited = 0, partial = 0, unseen = 0;
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    StepOfTest step(seed);
    if (!step.choose()) continue;
    step.poison();
    ::narrows::test::Warp warp(1 << 16);
    std::fill(warp.memory.begin(), warp.memory.end(), static_cast<unsigned char>(0xff));  // NaN
    Facts facts{};
    facts.block = step.block;
    const Call call{step.args, facts, 0};
    const i32 number = step.between(0, 1);  // of the step: either stage
    std::vector<Lanes> lanes(kWarp);
    std::array<Sight, kWarp> sights;
    warp.run([&](int lane) {
      load_keys(call);
      load_queries(call, number, step.place);
      load_outputs(call, number, step.place);
      wait_copies<0>();
      __syncthreads();
      Lanes& own = lanes[static_cast<std::size_t>(lane)];
      const Sight sight = sights[static_cast<std::size_t>(lane)] = sight_of(call, number);
      Tangents tangents;
      make_gradients(call, number, step.place, sight.partial, dropout_rule(step.args), own.p, own.g, tangents);
    });
    const Sight expected = expected_sight(step);
    for (const Sight& sight : sights) {
      ASSERT_EQ(sight.any, expected.any);
      ASSERT_EQ(sight.partial, expected.partial);
    }
    ++visited, partial += expected.partial, unseen += !expected.any;
    ASSERT_NO_FATAL_FAILURE(expect_step(step, lanes));
  }
  EXPECT_GT(visited, 30);
  EXPECT_GT(partial, 10);
  EXPECT_GT(visited - partial, 3);
  EXPECT_GT(unseen, 0);
}

}  // namespace narrows
}  // namespace backward_step
