// The first kernel of a backward pass on the host: what it leaves of each query row, and which sums of dQ begin at 0.
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <utility>

#include "tests/kernels/device/device.hpp"

#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of what varlen calls alone share; there are none here
#endif
#define __global__
#define __grid_constant__
#define __launch_bounds__(threads)

namespace backward_rows {
#include "shared/backward_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::bf16, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 96, kValueDim = 128, kBlockQueries = 64, kBlockKeys = 64, kWarps = 4,
                               kThreads = 128, kCopyBytes = 16;
[[maybe_unused]] constexpr bool kNatural = false, kAlibi = false, kFactsApart = true, kDeterministic = true;
}  // namespace narrows

#include "kernels/backward_rows_sm80.cu"

namespace narrows {

/// Two sequences, the second with fewer rows; what is behind them holds NaN. Their first rows see no key.
struct RowsCall {
  static constexpr float kPoison = std::numeric_limits<float>::quiet_NaN();
  static constexpr i32 batch = 2, heads = 2, rows = 150, keys = 80, columns = 120, blocks = 3;

  std::vector<i32> used{rows, 70};
  std::vector<unsigned short> o, dout;
  std::vector<float> lse, dlse, facts, sums, sinks{0.5f, -2.f}, sink_sums;
  BackwardArgs args;
  u32 far = 0;

  RowsCall() {
    std::mt19937 random(5);
    std::normal_distribution<float> normal;
    for (std::vector<unsigned short>* tensor : {&o, &dout})
      for (i32 s = 0; s < batch; ++s)
        for (i32 i = 0; i < rows; ++i)
          for (i32 x = 0; x < heads * columns; ++x)
            tensor->push_back(static_cast<unsigned short>(pack(exists(s, i) ? normal(random) : kPoison, 0.f)));
    for (i32 s = 0; s < batch; ++s)
      for (i32 h = 0; h < heads; ++h)
        for (i32 i = 0; i < rows; ++i) {
          lse.push_back(exists(s, i) ? (i % 9 == 4 ? -kInfinity<float> : 3 * normal(random)) : kPoison);
          dlse.push_back(exists(s, i) ? normal(random) : kPoison);
        }
    const i64 row = 2 * heads * columns;
    args.o = {reinterpret_cast<char*>(o.data()), {rows * row, row, 2 * columns, 2}};
    args.dout = {reinterpret_cast<char*>(dout.data()), {rows * row, row, 2 * columns, 2}};
    args.lse = {reinterpret_cast<char*>(lse.data()), {4 * heads * rows, 4 * rows, 4, 0}};
    args.dlse = {reinterpret_cast<char*>(dlse.data()), {4 * heads * rows, 4 * rows, 4, 0}};
    args.sinks = {reinterpret_cast<char*>(sinks.data()), {4, 0, 0, 0}, Element::fp32};
    args.dsinks = args.sinks;
    args.visibility = make_mask(-1, -1, true, 0);
    args.batch = batch;
    args.heads = heads;
    args.group = 1;
    args.kv_heads = heads;
    args.query_rows = rows;
    args.key_rows = keys;
    args.value_dim = columns;
    args.score_rows = args.score_keys = 0x7fffffff;
    args.seqused_q = {used.data(), 1};
    args.query_blocks = blocks;
    args.far_rows = &far;
    facts.assign(static_cast<std::size_t>(batch * heads * blocks * kBlockQueries * 2), kPoison);
    sums.assign(static_cast<std::size_t>(batch * heads * blocks * kBlockQueries * kHeadDim), kPoison);
    sink_sums.assign(static_cast<std::size_t>(heads * batch * blocks), kPoison);
    args.rows = reinterpret_cast<RowFacts*>(facts.data());
    args.query_sums = sums.data();
    args.sink_sums = sink_sums.data();
  }

  bool exists(i32 s, i32 i) const { return i < used[static_cast<std::size_t>(s)]; }
  void run() {
    for (u32 index = 0; index < batch * heads * blocks; ++index) {
      ::narrows::test::Block block(kWarps, 0);
      block.run([&] { backward_rows_sm80(args); }, index, batch * heads * blocks);
    }
  }
  std::size_t row_of(i32 s, i32 h, i32 i) const { return static_cast<std::size_t>((s * heads + h) * rows + i); }
  double delta(i32 s, i32 h, i32 i) const {
    double sum = 0;
    for (i32 x = 0; x < columns; ++x) {
      const auto at = static_cast<std::size_t>(((s * rows + i) * heads + h) * columns + x);
      sum += static_cast<double>(as_float(u32{o[at]} << 16)) * static_cast<double>(as_float(u32{dout[at]} << 16));
    }
    return sum - static_cast<double>(dlse[row_of(s, h, i)]);
  }
  void expect_row(i32 s, i32 h, i32 i) const {
    const i32 block = (s * heads + h) * blocks + i / kBlockQueries;
    const float* const own = &facts[static_cast<std::size_t>(block * kBlockQueries * 2)];
    const float reference = own[fact_place(i % kBlockQueries)],
                found = own[kBlockQueries + fact_place(i % kBlockQueries)];
    const bool sees = exists(s, i) && i + keys - used[static_cast<std::size_t>(s)] >= 0;
    if (!sees || lse[row_of(s, h, i)] == -kInfinity<float>) {
      ASSERT_EQ(reference, kInfinity<float>) << s << " row " << i;
      ASSERT_EQ(found, 0.f) << s << " row " << i;
      return;
    }
    ASSERT_FLOAT_EQ(reference, lse[row_of(s, h, i)] * static_cast<float>(kLog2e)) << s << " row " << i;
    ASSERT_NEAR(static_cast<double>(found), delta(s, h, i), 1e-4) << s << " row " << i << " head " << h;
  }
  double dsink(i32 s, i32 h) const {
    double sum = 0;
    for (i32 i = 0; exists(s, i) && i < rows; ++i)
      if (const auto own = static_cast<double>(lse[row_of(s, h, i)]); std::isfinite(own))
        sum -= std::exp(std::min(static_cast<double>(sinks[static_cast<std::size_t>(h)]) - own, 0.)) * delta(s, h, i);
    return sum;
  }
};

TEST(KernelBackwardRows, facts_sums_and_sinks) {
  RowsCall call;
  call.run();
  EXPECT_EQ(call.far, 0u);
  for (i32 s = 0; s < RowsCall::batch; ++s)
    for (i32 h = 0; h < RowsCall::heads; ++h)
      for (i32 i = 0; i < RowsCall::blocks * kBlockQueries; ++i) ASSERT_NO_FATAL_FAILURE(call.expect_row(s, h, i));
  for (std::size_t at = 0; at < call.sums.size(); ++at) {
    const std::size_t block = at / (kBlockQueries * kHeadDim) % RowsCall::blocks;
    const bool of_first = at < call.sums.size() / RowsCall::batch;
    if (block == (of_first ? 0u : 2u))
      ASSERT_EQ(call.sums[at], 0.f) << at << ": none of its rows sees a key";
    else
      ASSERT_TRUE(std::isnan(call.sums[at])) << at << ": a block of keys stores it";
  }
  for (i32 h = 0; h < RowsCall::heads; ++h)
    for (i32 s = 0; s < RowsCall::batch; ++s) {
      double found = 0;
      for (i32 block = 0; block < RowsCall::blocks; ++block)
        found += static_cast<double>(
            call.sink_sums[static_cast<std::size_t>((h * RowsCall::batch + s) * RowsCall::blocks + block)]);
      ASSERT_NEAR(found, call.dsink(s, h), 1e-3) << s << " head " << h;
    }
}

TEST(KernelBackwardRows, no_sums_where_dq_is_not_wanted) {
  RowsCall call;
  call.args.query_sums = nullptr;
  call.run();
  for (const float sum : call.sums) ASSERT_TRUE(std::isnan(sum));
}

}  // namespace narrows
}  // namespace backward_rows
