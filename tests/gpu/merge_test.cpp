// Parts of attention joined on a GPU: as the CPU joins them, in any layout, with empty parts, and from a graph.
#include "cpu/reference.hpp"
#include "tests/gpu/device_call.hpp"
#include "tests/support/check.hpp"

#include <array>
#include <cmath>
#include <deque>

namespace narrows::test {
namespace {

/// Parts of one shape, and what they are joined to.
struct Joined {
  DType dtype;
  std::vector<Array> parts_o, parts_lse;
  Array o, lse, sinks;

  Joined(DType dtype_, const Dims& shape, const Dims& rows, std::int64_t count, const Arrangement& o_arrangement = {},
         const Arrangement& lse_arrangement = {})
      : dtype(dtype_),
        o(dtype_, shape, o_arrangement),
        lse(DType::fp32, rows, lse_arrangement),
        sinks(DType::fp32, {shape[shape.rank() - 2]}) {
    for (std::int64_t part = 0; part < count; ++part) {
      const auto seed = static_cast<std::uint64_t>(part);
      parts_o.push_back(Array(dtype, shape, o_arrangement).fill_gaussian(seed));
      parts_lse.push_back(Array(DType::fp32, rows, lse_arrangement).fill_gaussian(100 + seed));
    }
    sinks.fill_gaussian(7);
  }
  std::vector<Outputs> parts() const {
    std::vector<Outputs> all;
    for (std::size_t part = 0; part < parts_o.size(); ++part) all.push_back({parts_o[part], parts_lse[part]});
    return all;
  }
};

/// The same on the device.
class DeviceJoined {
 public:
  explicit DeviceJoined(const Joined& host) : o_(host.o), lse_(host.lse), sinks_(host.sinks) {
    for (std::size_t part = 0; part < host.parts_o.size(); ++part) {
      const Mirror &o = inputs_.emplace_back(host.parts_o[part]), &lse = inputs_.emplace_back(host.parts_lse[part]);
      parts_.push_back({o.tensor(), lse.tensor()});
    }
  }
  void run(bool with_sinks, void* stream = nullptr) {
    o_.poison(stream);
    lse_.poison(stream);
    merge(parts_, {o_.tensor(), lse_.tensor()}, with_sinks ? sinks_.tensor() : Tensor{}, stream);
  }
  void download() const {
    wait_for_device();
    o_.download();
    lse_.download();
    for (const Mirror& input : inputs_) EXPECT_TRUE(input.untouched());
    EXPECT_TRUE(o_.margins_intact() && lse_.margins_intact());
  }

 private:
  std::deque<Mirror> inputs_;
  Mirror o_, lse_, sinks_;
  std::vector<Outputs> parts_;
};

void expect_as_on_the_cpu(Joined& joined, bool with_sinks) {
  DeviceJoined gpu(joined);
  gpu.run(with_sinks);
  gpu.download();
  EXPECT_TRUE(joined.o.gaps_intact() && joined.lse.gaps_intact());
  const Array o = joined.o, lse = joined.lse;
  merge(joined.parts(), {joined.o, joined.lse}, with_sinks ? joined.sinks.tensor() : Tensor{});
  const double tolerance = joined.dtype == DType::bf16 ? 0x1p-7 : joined.dtype == DType::fp16 ? 0x1p-10 : 4e-6;
  o.for_each([&](const Dims& at) {
    ASSERT_NEAR(o[at], joined.o[at], tolerance * std::max(1.0, std::abs(joined.o[at]))) << to_text(at);
  });
  lse.for_each([&](const Dims& at) {
    if (joined.lse[at] == -kInfinite)
      ASSERT_EQ(lse[at], -kInfinite) << to_text(at);
    else
      ASSERT_NEAR(lse[at], joined.lse[at], 4e-6) << to_text(at);
  });
}

using GpuMerge = GpuTest;

TEST_F(GpuMerge, parts_are_joined_as_on_the_cpu) {
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    for (const std::int64_t count : {0, 1, 2, 7, 32})
      for (const bool with_sinks : {false, true}) {
        SCOPED_TRACE(std::string(name(dtype)) + " " + std::to_string(count));
        Joined joined(dtype, {2, 5, 3, 72}, {2, 3, 5}, count);
        expect_as_on_the_cpu(joined, with_sinks);
      }
}

TEST_F(GpuMerge, any_layout) {
  const Arrangement turned{.order = {1, 2, 0}, .gap = 2};
  Joined packed(DType::bf16, {11, 3, 33}, {3, 11}, 3, turned, {.order = {1, 0}, .gap = 1});
  expect_as_on_the_cpu(packed, true);
}

TEST_F(GpuMerge, empty_parts_are_left_out_whatever_they_hold) {
  Joined joined(DType::fp16, {1, 4, 2, 40}, {1, 2, 4}, 3);
  joined.parts_o[1].poison();
  joined.parts_lse[1].fill(-kInfinite);
  for (const std::size_t part : {0u, 2u}) joined.parts_lse[part].set({0, 1, 2}, -kInfinite);  // one row: all of them
  for (const bool with_sinks : {false, true}) expect_as_on_the_cpu(joined, with_sinks);
  EXPECT_EQ((joined.o[{0, 2, 1, 5}]), 0);
}

TEST_F(GpuMerge, lse_far_apart_and_nan) {
  Joined joined(DType::fp32, {1, 3, 1, 8}, {1, 1, 3}, 2);
  joined.parts_lse[1].set({0, 0, 0}, 3e38);
  joined.parts_lse[1].set({0, 0, 1}, kNaN);
  DeviceJoined gpu(joined);
  gpu.run(false);
  gpu.download();
  EXPECT_EQ((joined.o[{0, 0, 0, 3}]), (joined.parts_o[1][{0, 0, 0, 3}]));
  EXPECT_TRUE(std::isnan(joined.lse[{0, 0, 1}]) && std::isnan(joined.o[{0, 1, 0, 3}]));
  EXPECT_FALSE(std::isnan(joined.lse[{0, 0, 2}]) || std::isnan(joined.o[{0, 2, 0, 3}]));
}

/// Gradients beside the CPU's, of parts one of which is empty; of the first part dO is not wanted, of the last dLSE is not.
void expect_gradients_as_on_the_cpu(DType dtype, std::size_t count, bool with_sinks) {
  Joined joined(dtype, {2, 5, 3, 72}, {2, 3, 5}, static_cast<std::int64_t>(count));
  if (count > 2) {
    joined.parts_o[1].poison();
    joined.parts_lse[1].fill(-kInfinite);
  }
  joined.o.fill_gaussian(50);  // in the place of dO and dLSE
  joined.lse.fill_gaussian(51);
  const Joined gradients(dtype, {2, 5, 3, 72}, {2, 3, 5}, static_cast<std::int64_t>(count));
  Joined expected = gradients, found = gradients;
  const auto wanted = [&](std::vector<Outputs> parts) {
    parts.front().o = {};
    parts.back().lse = {};
    return parts;
  };
  const Tensor no_sinks;
  merge_backward(joined.parts(), joined.o, joined.lse,
                 {wanted(expected.parts()), with_sinks ? expected.sinks.tensor() : no_sinks},
                 with_sinks ? joined.sinks.tensor() : no_sinks);
  std::deque<Mirror> inputs, results;
  const auto on_device = [](std::deque<Mirror>& mirrors, const std::vector<Outputs>& parts) {
    std::vector<Outputs> all;
    for (const Outputs& part : parts)
      all.push_back({mirrors.emplace_back(part.o).tensor(), mirrors.emplace_back(part.lse).tensor()});
    return all;
  };
  const std::vector<Outputs> parts = on_device(inputs, joined.parts()), targets = on_device(results, found.parts());
  const Mirror &dout = inputs.emplace_back(joined.o), &dlse = inputs.emplace_back(joined.lse),
               &sinks = inputs.emplace_back(joined.sinks), &dsinks = results.emplace_back(found.sinks);
  merge_backward(parts, dout.tensor(), dlse.tensor(), {wanted(targets), with_sinks ? dsinks.tensor() : no_sinks},
                 with_sinks ? sinks.tensor() : no_sinks);
  wait_for_device();
  for (const Mirror& result : results) {
    result.download();
    EXPECT_TRUE(result.margins_intact());
  }
  for (const Mirror& input : inputs) EXPECT_TRUE(input.untouched());
  const double tolerance = dtype == DType::bf16 ? 0x1p-7 : dtype == DType::fp16 ? 0x1p-10 : 1e-5;
  const auto expect_near = [&](const Array& ours, const Array& exact, double error) {
    ours.for_each([&](const Dims& at) {
      ASSERT_NEAR(ours[at], exact[at], error * std::max(1.0, std::abs(exact[at]))) << to_text(at);
    });
  };
  for (std::size_t part = 0; part < count; ++part) {
    SCOPED_TRACE(part);
    expect_near(found.parts_o[part], expected.parts_o[part], tolerance);
    expect_near(found.parts_lse[part], expected.parts_lse[part], 1e-4);
  }
  expect_near(found.sinks, expected.sinks, 1e-4);
}

TEST_F(GpuMerge, gradients_are_as_on_the_cpu) {
  for (const DType dtype : {DType::bf16, DType::fp16, DType::fp32})
    for (const std::size_t count : {std::size_t{1}, std::size_t{2}, std::size_t{7}, std::size_t{32}})
      for (const bool with_sinks : {false, true}) {
        SCOPED_TRACE(std::string(name(dtype)) + " " + std::to_string(count));
        expect_gradients_as_on_the_cpu(dtype, count, with_sinks);
      }
}

/// More rows than thread blocks have warps for at once.
TEST_F(GpuMerge, many_rows) {
  Joined joined(DType::bf16, {1, 1 << 16, 5, 1}, {1, 5, 1 << 16}, 2);
  DeviceJoined gpu(joined);
  gpu.run(false);
  gpu.download();
  const auto weight = [&](const Dims& at) {
    return 1 / (1 + std::exp(joined.parts_lse[1][at] - joined.parts_lse[0][at]));
  };
  for (const std::int64_t i : {0, 1, 52428, 52429, (1 << 16) - 1})
    for (std::int64_t h = 0; h < 5; ++h) {
      const double first = weight({0, h, i}),
                   expected = first * joined.parts_o[0][{0, i, h, 0}] + (1 - first) * joined.parts_o[1][{0, i, h, 0}];
      EXPECT_NEAR((joined.o[{0, i, h, 0}]), expected, 0x1p-7 * std::max(1.0, std::abs(expected))) << i << " " << h;
    }
}

TEST_F(GpuMerge, is_recorded_in_a_graph) {
  Joined joined(DType::bf16, {1, 4, 2, 64}, {1, 2, 4}, 2);
  DeviceJoined gpu(joined);
  const TestStream stream;
  gpu.run(false, stream.handle());
  const Graph graph(stream, [&] { gpu.run(false, stream.handle()); });
  gpu.download();
  const Array once = joined.o;
  graph.replay(stream);
  stream.wait();
  gpu.download();
  EXPECT_TRUE(joined.o.same_bits(once));
}

/// A prefix that all sequences share and what each has of its own, against one call on both.
TEST_F(GpuMerge, a_shared_prefix_and_the_rest_equal_all_keys_at_once) {
  constexpr std::int64_t kPrefix = 200, kOwn = 33, kBatch = 3;
  Attention whole({kBatch, 1, kPrefix + kOwn, 8, 2, 64, 64}, DType::bf16);
  const auto cut = [](const Array& from, std::int64_t begin, std::int64_t rows, std::int64_t batch) {
    return Array(DType::bf16, {batch, rows, 2, 64}).fill([&](const Dims& at) {
      return from[{at[0], begin + at[1], at[2], at[3]}];
    });
  };
  for (Array* const cache : {&whole.k, &whole.v}) {
    const Array own = *cache;
    cache->fill([&](const Dims& at) { return own[{at[1] < kPrefix ? 0 : at[0], at[1], at[2], at[3]}]; });
  }
  const Array prefix_k = cut(whole.k, 0, kPrefix, 1), prefix_v = cut(whole.v, 0, kPrefix, 1),
              own_k = cut(whole.k, kPrefix, kOwn, kBatch), own_v = cut(whole.v, kPrefix, kOwn, kBatch),
              filled = int32_array({kPrefix}), own_filled = int32_array({kOwn, kOwn, kOwn});
  Joined joined(DType::bf16, whole.o.shape(), whole.lse.shape(), 2);
  // All sequences' rows as one of three rows, which sees the prefix once.
  Tensor q = whole.q, o = joined.parts_o[0], lse = joined.parts_lse[0];
  q.shape = {1, kBatch, 8, 64};
  o.shape = {1, kBatch, 8, 64};
  lse.shape = {1, 8, kBatch};
  q.strides = o.strides = {0, 512, 64, 1};
  lse.strides = {0, 1, 8};
  Options options;
  options.family = "sm80";
  options.cache_seqlens = filled;
  DeviceCall shared({q, prefix_k, prefix_v}, {o, lse}, options);
  shared.run();
  shared.download();
  options.cache_seqlens = own_filled;
  DeviceCall own({whole.q, own_k, own_v}, {joined.parts_o[1], joined.parts_lse[1]}, options);
  own.run();
  own.download();
  DeviceJoined gpu(joined);
  gpu.run(false);
  gpu.download();
  reference::forward(whole.in(), whole.out(), {});
  whole.o.for_each([&](const Dims& at) { ASSERT_NEAR(joined.o[at], whole.o[at], 0x1p-7) << to_text(at); });
  whole.lse.for_each([&](const Dims& at) { ASSERT_NEAR(joined.lse[at], whole.lse[at], 1e-4) << to_text(at); });
}

}  // namespace
}  // namespace narrows::test
