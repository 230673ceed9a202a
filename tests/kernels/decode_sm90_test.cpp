// The whole decode kernel of family sm90 on the host, roles, barriers and all, against the definition: V as a part of K's memory
// and of its own, pages, lengths alike and far apart, splits that the last thread block joins. What is asynchronous on the GPU is
// done at once here, so that a missing wait is not found.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <random>
#include <utility>

#include "tests/kernels/device/device.hpp"

#define __global__
#define __grid_constant__
#define __launch_bounds__(threads, blocks)
#define __align__(bytes) __attribute__((aligned(bytes)))
#undef __shared__
#define __shared__
// Their names have no namespace, and every such test has a kernel of its own.
#define memory memory_decode

namespace decode_of_sm90 {
#include "shared/decode_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::bf16, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 128, kValueDim = 128, kBlockQueries = 64, kBlockKeys = 64, kWarps = 12,
                               kThreads = 384, kStages = 2, kCopyBytes = 16, kMostParts = 32, kSharedBytes = 65536;
[[maybe_unused]] constexpr bool kNatural = false, kSoftcap = false, kAlibi = false, kBias = false, kMask = false,
                                kTurnsQueries = false, kDropout = false;
}  // namespace narrows

#include "kernels/ptx_sm90.cuh"

namespace narrows {
inline void multiply_scores(float (&d)[1][kBlockKeys / 8][4], u64 a, u64 b, int adds) {
  multiply_on_host(d, a, b, false, adds, false);
}
inline void multiply_output(float (&d)[1][kValueDim / 16][4], const u32 (&a)[4], u64 b, int adds) {
  multiply_on_host(d, a, b, true, adds, false);
}
}  // namespace narrows

extern "C" {
alignas(1024) char memory[narrows::kSharedBytes];
}
#include "kernels/decode_sm90.cu"
#undef memory

namespace narrows {

constexpr i32 kWidth = 120, kValueWidth = 104;  // of rows; less than on chip

/// Sequences of one kv head in pages or in rows of their own. What no row may see holds NaN.
struct CachedCall {
  i32 heads, queries, page;
  bool shares;
  std::vector<i32> lengths, table;
  i32 slots = 0, pages = 0;  // of a sequence
  std::vector<unsigned short> q, k, v, o;
  std::vector<float> lse, sinks, outputs;
  std::vector<RowSum> sums;
  std::vector<u64> tickets;
  i32 status[4] = {};
  std::function<void()> write_before;
  DecodeArgs args;

  CachedCall(std::vector<i32> lengths_, i32 heads_, i32 queries_, i32 page_, bool shares_)
      : heads(heads_), queries(queries_), page(page_), shares(shares_), lengths(std::move(lengths_)) {
    for (const i32 length : lengths) slots = max_of(slots, length + 3);
    if (page) pages = ceil_div(slots, page), slots = pages * page;
    const i32 batch = static_cast<i32>(lengths.size());
    for (i32 s = 0; s < batch; ++s)
      for (i32 p = 0; p < pages; ++p) table.push_back((batch - 1 - s) + batch * p);
    const auto nan = static_cast<unsigned short>(bf16_bits(std::numeric_limits<float>::quiet_NaN()));
    q.resize(size(batch * queries * heads * kWidth));
    k.assign(size(batch * slots * kWidth), nan);
    v.assign(shares ? 0 : size(batch * slots * kValueWidth), nan);
    o.assign(size(batch * queries * heads * kValueWidth), nan);
    lse.assign(size(batch * queries * heads), std::numeric_limits<float>::quiet_NaN());
    fill();
    describe();
  }

  static std::size_t size(i32 count) { return static_cast<std::size_t>(count); }
  i32 row(std::size_t s, i32 slot) const {
    const i32 own = static_cast<i32>(s);
    return page ? table[size(own * pages + slot / page)] * page + slot % page : own * slots + slot;
  }

  void fill() {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    const auto draw = [&] { return static_cast<unsigned short>(bf16_bits(normal(random))); };
    for (unsigned short& x : q) x = draw();
    for (std::size_t s = 0; s < lengths.size(); ++s)
      for (i32 slot = 0; slot < lengths[s]; ++slot) {
        for (i32 x = 0; x < kWidth; ++x) k[size(row(s, slot) * kWidth + x)] = draw();
        for (i32 x = 0; x < kValueWidth && !shares; ++x) v[size(row(s, slot) * kValueWidth + x)] = draw();
      }
    for (i32 h = 0; h < heads; ++h) sinks.push_back(normal(random));
  }

  void describe() {
    const auto tensor = [](auto& data, i64 rows, i64 columns, i64 item) {
      TensorArg arg;
      arg.data = reinterpret_cast<char*>(data.data());
      for (const auto& [axis, stride] : {std::pair{0, rows * columns}, {1, columns}, {2, i64{1}}, {3, i64{1}}})
        arg.strides[axis] = stride * item;
      return arg;
    };
    const i64 kept = page ? page : slots;
    args.q = tensor(q, queries, heads * kWidth, 2);
    args.q.strides[2] = 2 * kWidth;
    args.o = tensor(o, queries, heads * kValueWidth, 2);
    args.o.strides[2] = 2 * kValueWidth;
    args.k = tensor(k, kept, kWidth, 2);
    args.v = shares ? args.k : tensor(v, kept, kValueWidth, 2);
    args.lse = {reinterpret_cast<char*>(lse.data()), {4 * i64{heads} * queries, 4 * i64{queries}, 4, 0}, Element::fp32};
    args.sinks = {reinterpret_cast<char*>(sinks.data()), {4, 0, 0, 0}, Element::fp32};
    args.batch = static_cast<i32>(lengths.size());
    args.heads = args.group = heads;
    args.query_rows = queries;
    args.head_dim = kWidth;
    args.value_dim = kValueWidth;
    args.score_rows = args.score_keys = 0x7fffffff;
    args.units = fused_units<float>(0.1);
    args.visibility = make_mask(-1, -1, true, 0);
    args.cached = true;
    args.cache_seqlens = {lengths.data(), 1};
    args.capacity = slots;
    args.cache_rows = args.batch;
    if (page) args.table = table.data(), args.table_row = pages, args.table_stride = 1;
    args.page_size = max_of(page, 1);
    args.pages = args.batch * pages;
    args.by_tile_rows = divider(1);
    args.by_group = divider(heads);
    args.by_page = divider(args.page_size);
    args.whole_columns = true;
    args.status = status;
  }

  void run(u32 blocks, i32 splits = 0) {
    const i32 rows = args.batch * ceil_div(heads * queries, kBlockQueries),
              slots_of_parts = max_of(2 * static_cast<i32>(blocks), rows * splits);
    args.splits = splits;
    args.by_splits =
        divider(splits_of(ceil_div(args.capacity, kBlockKeys), most_splits(rows, static_cast<i32>(blocks))));
    args.line_blocks = static_cast<i32>(blocks);
    outputs.assign(size(slots_of_parts * kBlockQueries * kColumns), std::numeric_limits<float>::quiet_NaN());
    sums.assign(size(slots_of_parts * kBlockQueries), RowSum{});
    tickets.assign(size(slots_of_parts), ~u64{0});
    args.outputs = outputs.data();
    args.sums = sums.data();
    args.tickets = tickets.data();
    for (u32 index = 0; index < blocks; ++index) {
      if (write_before) write_before();
      ::narrows::test::Block block(kThreads / kWarp, kSharedBytes);
      std::fill(block.memory.begin(), block.memory.end(), static_cast<unsigned char>(0xff));  // NaN
      block.run([&] { decode_sm90(args); }, index, blocks);
    }
  }
  /// A plain call whose thread blocks begin while another kernel runs, which leaves `before` in place of the lengths until its end.
  void run_after(const std::vector<i32>& before, u32 blocks) {
    const std::vector<i32> after = lengths;
    args.plain_filled = args.capacity;
    write_before = [this, before] { std::copy(before.begin(), before.end(), lengths.begin()); };
    ::narrows::test::previous_kernel = [this, after] { std::copy(after.begin(), after.end(), lengths.begin()); };
    run(blocks);
    ::narrows::test::previous_kernel = nullptr;
  }

  static double value(unsigned short bits) { return static_cast<double>(as_float(u32{bits} << 16)); }

  void expect_row(std::size_t s, i32 i, i32 h) const {
    const i32 first = (static_cast<i32>(s) * queries + i) * heads + h, seen = max_of(lengths[s] - queries + i + 1, 0);
    std::vector<double> logits, expected(size(kValueWidth));
    double most = static_cast<double>(sinks[size(h)]);
    for (i32 j = 0; j < seen; ++j) {
      double dot = 0;
      for (i32 x = 0; x < kWidth; ++x)
        dot += value(q[size(first * kWidth + x)]) * value(k[size(row(s, j) * kWidth + x)]);
      logits.push_back(dot * 0.1);
      most = std::max(most, logits.back());
    }
    double sum = std::exp(static_cast<double>(sinks[size(h)]) - most);
    for (i32 j = 0; j < seen; ++j) {
      const double weight = std::exp(logits[size(j)] - most);
      sum += weight;
      for (i32 x = 0; x < kValueWidth; ++x)
        expected[size(x)] +=
            weight * value(shares ? k[size(row(s, j) * kWidth + x)] : v[size(row(s, j) * kValueWidth + x)]);
    }
    ASSERT_NEAR(lse[size((static_cast<i32>(s) * heads + h) * queries + i)], most + std::log(sum),
                1e-5 * (1 + std::abs(most)))
        << s << " row " << i << " head " << h;
    for (i32 x = 0; x < kValueWidth; ++x)
      ASSERT_NEAR(value(o[size(first * kValueWidth + x)]), expected[size(x)] / sum, 2e-2)
          << s << " row " << i << " head " << h << " column " << x;
  }
  void expect_all() const {
    ASSERT_EQ(status[0], 0);
    for (std::size_t s = 0; s < lengths.size(); ++s)
      for (i32 i = 0; i < queries; ++i)
        for (i32 h = 0; h < heads; ++h) ASSERT_NO_FATAL_FAILURE(expect_row(s, i, h));
  }
};

TEST(KernelDecodeSm90, v_is_a_part_of_k_or_its_own_in_rows_and_in_pages) {
  for (const bool shares : {true, false})
    for (const i32 page : {0, 24}) {
      SCOPED_TRACE(testing::Message() << shares << " " << page);
      CachedCall call({150, 64, 1, 0}, 20, 2, page, shares);
      call.run(3);
      call.expect_all();
    }
}

TEST(KernelDecodeSm90, rows_of_one_length_are_cut_alike_and_joined) {
  CachedCall call({520, 515}, 66, 1, 0, true);  // two tiles of packed rows each
  call.run(8);
  call.expect_all();
  call.run(3, 2);
  call.expect_all();
}

TEST(KernelDecodeSm90, many_parts_are_joined_in_groups) {
  CachedCall call({640}, 16, 1, 0, true);
  call.run(10, 10);
  call.expect_all();
}

/// What a plain call plans before the kernel ahead has ended counts only if its lengths stay, and none of them breaks a rule.
TEST(KernelDecodeSm90, lengths_that_the_kernel_ahead_writes) {
  const std::vector<i32> after = {150, 64, 1, 0};
  for (const std::vector<i32>& before :
       {after, {150, 64, 1, 9}, {0, 0, 0, 0}, {1, 64, 150, 0}, {150, 64, 1, -5}, {1 << 30, 64, 1, 0}})
    for (const i32 page : {0, 24}) {
      SCOPED_TRACE(testing::Message() << before[0] << " " << before[3] << ", pages of " << page);
      CachedCall call(after, 20, 2, page, true);
      call.run_after(before, 3);
      call.expect_all();
    }
}

TEST(KernelDecodeSm90, a_length_that_the_kernel_ahead_leaves_broken_is_reported) {
  for (const i32 wrong : {-5, 1 << 30}) {
    CachedCall call({90, 70}, 16, 1, 0, true);
    call.lengths[1] = wrong;
    call.run_after(call.lengths, 2);
    EXPECT_EQ(call.status[0], static_cast<i32>(StatusCode::cache_seqlens));
    EXPECT_EQ(call.status[1], 1);
    EXPECT_EQ(call.status[2], wrong);
    EXPECT_TRUE(std::isnan(call.lse[16]));
    EXPECT_FALSE(std::isnan(call.lse[0]));
  }
}

TEST(KernelDecodeSm90, an_entry_that_is_no_page_makes_its_sequence_nan) {
  CachedCall call({90, 70}, 16, 1, 16, true);
  call.table[2] = 99;
  call.run(2);
  EXPECT_EQ(call.status[0], static_cast<i32>(StatusCode::block_table));
  EXPECT_EQ(call.status[1], 0);
  EXPECT_EQ(call.status[2], 99);
  for (i32 h = 0; h < 16; ++h) {
    EXPECT_TRUE(std::isnan(call.lse[CachedCall::size(h)]));
    EXPECT_TRUE(std::isnan(CachedCall::value(call.o[CachedCall::size(h * kValueWidth + 77)])));
    EXPECT_FALSE(std::isnan(CachedCall::value(call.o[CachedCall::size((16 + h) * kValueWidth + 77)])));
  }
}

}  // namespace narrows
}  // namespace decode_of_sm90
