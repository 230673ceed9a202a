// merge and merge_backward: against attention over all keys at once, against central differences, and on empty parts.
#include <gtest/gtest.h>

#include "core/types.hpp"
#include "tests/support/attention.hpp"
#include "tests/support/check.hpp"

#include <array>
#include <cmath>

namespace narrows::test {
namespace {

/// Attention over keys cut into parts.
struct Parts {
  Attention whole;
  std::vector<Array> o, lse;

  Parts(const Sizes& sizes, const std::vector<std::int64_t>& ends, DType dtype = DType::fp32) : whole(sizes, dtype) {
    std::int64_t begin = 0;
    for (const std::int64_t end : ends) {
      Attention part = whole;
      const auto keys = [&](const Array& from) {
        Tensor t = from.tensor();
        t.data = static_cast<std::byte*>(t.data) + begin * t.strides[1] * static_cast<std::int64_t>(item_size(t.dtype));
        t.shape[1] = end - begin;
        return t;
      };
      forward({part.q, keys(part.k), keys(part.v)}, part.out(), {});
      o.push_back(part.o);
      lse.push_back(part.lse);
      begin = end;
    }
  }
  std::vector<Outputs> outputs() const {
    std::vector<Outputs> all;
    for (std::size_t part = 0; part < o.size(); ++part) all.push_back({o[part], lse[part]});
    return all;
  }
};

class MergeDtypes : public testing::TestWithParam<DType> {};

TEST_P(MergeDtypes, parts_equal_attention_over_all_keys) {
  const Array sinks(DType::bf16, {4}, std::vector<double>{0.5, -kInfinite, 3, 0});
  for (const bool with_sinks : {false, true}) {
    Parts parts({2, 67, 90, 4, 2, 16, 24}, {1, 40, 40, 90}, GetParam());
    Attention& whole = parts.whole;
    merge(parts.outputs(), whole.out(), with_sinks ? sinks.tensor() : Tensor{});
    if (with_sinks) whole.options.sinks = sinks;
    if (GetParam() == DType::fp32 || GetParam() == DType::fp64) {
      EXPECT_TRUE(forward_agrees(whole.in(), whole.out(), whole.options));
      continue;
    }
    // 16-bit parts have been rounded once more than the whole.
    Attention exact = whole;
    forward(exact.in(), exact.out(), exact.options);
    const double tolerance = GetParam() == DType::bf16 ? 0x1p-6 : 0x1p-9;
    whole.o.for_each([&](const Dims& at) { ASSERT_NEAR(whole.o[at], exact.o[at], tolerance); });
    whole.lse.for_each([&](const Dims& at) { ASSERT_NEAR(whole.lse[at], exact.lse[at], 1e-5); });
  }
}
INSTANTIATE_TEST_SUITE_P(All, MergeDtypes, testing::Values(DType::fp32, DType::bf16, DType::fp16, DType::fp64),
                         [](const auto& param) { return std::string(name(param.param)); });

TEST(Merge, A02_A04_empty_parts_are_left_out_whatever_they_hold) {
  Array o(DType::fp16, {1, 1, 1, 64}), lse(DType::fp32, {1, 1, 1});
  const Array zero = Array(DType::fp16, {1, 1, 1, 64}).fill(0), stale(DType::fp16, {1, 1, 1, 64}),
              one = Array(DType::fp16, {1, 1, 1, 64}).fill(1), none = Array(DType::fp32, {1, 1, 1}).fill(-kInfinite),
              some = Array(DType::fp32, {1, 1, 1}).fill(2);
  for (const std::vector<Outputs>& parts : {std::vector<Outputs>{},
                                            {{zero, none}},
                                            {{zero, none}, {zero, none}},
                                            {{stale, none}, {zero, none}, {stale, none}}}) {
    merge(parts, {o, lse});
    EXPECT_EQ((lse[{0, 0, 0}]), -kInfinite);
    o.for_each([&](const Dims& at) { EXPECT_EQ(o[at], 0); });
  }
  const std::array<Outputs, 3> mixed{Outputs{stale, none}, Outputs{one, some}, Outputs{stale, none}};
  merge(mixed, {o, lse});
  EXPECT_EQ((lse[{0, 0, 0}]), 2);
  o.for_each([&](const Dims& at) { EXPECT_EQ(o[at], 1); });
  const std::array<Outputs, 2> in_place{Outputs{o, lse}, Outputs{zero, some}};
  merge(in_place, {o, lse});
  EXPECT_NEAR((lse[{0, 0, 0}]), 2 + std::log(2.0), 1e-6);
  o.for_each([&](const Dims& at) { EXPECT_EQ(o[at], 0.5); });
}

TEST(Merge, J04_lse_far_apart_do_not_overflow) {
  for (const double distance : {1e4, -1e4, 3e38, 0.0}) {
    const Array first = Array(DType::fp32, {1, 1, 1, 2}).fill(3), second = Array(DType::fp32, {1, 1, 1, 2}).fill(5),
                low = Array(DType::fp32, {1, 1, 1}).fill(7), high = Array(DType::fp32, {1, 1, 1}).fill(7 + distance);
    Array o(DType::fp32, {1, 1, 1, 2}), lse(DType::fp32, {1, 1, 1});
    const std::array<Outputs, 2> parts{Outputs{first, low}, Outputs{second, high}};
    merge(parts, {o, lse});
    EXPECT_EQ((o[{0, 0, 0, 1}]), distance > 0 ? 5 : distance < 0 ? 3 : 4) << distance;
    const double expected = distance == 0 ? 7 + std::log(2.0) : std::max(low[{0, 0, 0}], high[{0, 0, 0}]);
    EXPECT_FLOAT_EQ(static_cast<float>(lse[{0, 0, 0}]), static_cast<float>(expected)) << distance;
  }
}

TEST(Merge, nan_stays_in_its_row) {
  Parts parts({1, 3, 20, 1, 1, 8, 8}, {9, 20});
  parts.lse[1].set({0, 0, 1}, kNaN);
  Attention& a = parts.whole;
  merge(parts.outputs(), a.out());
  for (std::int64_t i = 0; i < 3; ++i) {
    EXPECT_EQ(std::isnan(a.lse[{0, 0, i}]), i == 1);
    EXPECT_EQ(std::isnan(a.o[{0, i, 0, 4}]), i == 1);
  }
}

TEST(Merge, any_strides_and_packed_rows) {
  const Sizes sizes{1, 11, 20, 3, 3, 8, 8};
  Parts parts(sizes, {9, 20});
  Attention& a = parts.whole;
  merge(parts.outputs(), a.out());
  const Arrangement turned{.order = {1, 2, 0}, .gap = 2};
  std::vector<Array> o, lse;
  for (std::size_t part = 0; part < 2; ++part) {
    o.push_back(Array(DType::fp32, {11, 3, 8}, turned));
    o.back().fill([&](const Dims& at) { return parts.o[part][{0, at[0], at[1], at[2]}]; });
    lse.push_back(Array(DType::fp32, {3, 11}, {.order = {1, 0}, .gap = 1}));
    lse.back().fill([&](const Dims& at) { return parts.lse[part][{0, at[0], at[1]}]; });
  }
  Array merged(DType::fp32, {11, 3, 8}, turned);
  const std::array<Outputs, 2> packed{Outputs{o[0], lse[0]}, Outputs{o[1], lse[1]}};
  merge(packed, {merged, {}});
  merged.for_each([&](const Dims& at) { ASSERT_EQ(merged[at], (a.o[{0, at[0], at[1], at[2]}])); });
  EXPECT_TRUE(merged.gaps_intact());
}

/// sum(dO * O) + sum(dLSE * LSE) of a merge, in fp64.
struct Objective {
  std::vector<Array> o, lse;
  Array sinks, dout, dlse;

  std::vector<Outputs> parts() const {
    std::vector<Outputs> all;
    for (std::size_t part = 0; part < o.size(); ++part) all.push_back({o[part], lse[part]});
    return all;
  }
  double value() const {
    Array merged_o(DType::fp64, dout.shape()), merged_lse(DType::fp64, dlse.shape());
    merge(parts(), {merged_o, merged_lse}, sinks);
    double sum = 0;
    dout.for_each([&](const Dims& at) { sum += dout[at] * merged_o[at]; });
    dlse.for_each([&](const Dims& at) { sum += dlse[at] * merged_lse[at]; });
    return sum;
  }
};

Objective objective() {
  const Dims shape{2, 3, 2, 5}, rows{2, 2, 3};
  Objective made;
  for (std::uint64_t part = 0; part < 3; ++part) {
    made.o.push_back(Array(DType::fp64, shape).fill_gaussian(part));
    made.lse.push_back(Array(DType::fp64, rows).fill_gaussian(10 + part));
  }
  made.lse[1].set({1, 0, 2}, -kInfinite);
  made.sinks = Array(DType::fp64, {2}).fill_gaussian(20);
  made.dout = Array(DType::fp64, shape).fill_gaussian(21);
  made.dlse = Array(DType::fp64, rows).fill_gaussian(22);
  return made;
}

void expect_gradient(Objective& f, Array& variable, const Array& gradient, const char* what) {
  constexpr double kStep = 1e-5;
  variable.for_each([&](const Dims& at) {
    const double x = variable[at];
    if (x == -kInfinite) {
      EXPECT_EQ(gradient[at], 0) << what;
      return;
    }
    variable.set(at, x + kStep);
    const double above = f.value();
    variable.set(at, x - kStep);
    const double below = f.value();
    variable.set(at, x);
    EXPECT_NEAR(gradient[at], (above - below) / (2 * kStep), 1e-8) << what << " " << to_text(at);
  });
}

TEST(Merge, gradients_are_central_differences) {
  Objective f = objective();
  std::vector<Array> o, lse;
  std::vector<Outputs> gradients;
  for (std::size_t part = 0; part < 3; ++part) {
    o.emplace_back(DType::fp64, f.dout.shape());
    lse.emplace_back(DType::fp64, f.dlse.shape());
  }
  for (std::size_t part = 0; part < 3; ++part) gradients.push_back({o[part], lse[part]});
  Array dsinks(DType::fp64, {2});
  merge_backward(f.parts(), f.dout, f.dlse, {gradients, dsinks}, f.sinks);
  for (std::size_t part = 0; part < 3; ++part) {
    expect_gradient(f, f.o[part], o[part], "o");
    expect_gradient(f, f.lse[part], lse[part], "lse");
  }
  expect_gradient(f, f.sinks, dsinks, "sinks");
}

TEST(Merge, empty_parts_and_sinks_get_no_gradient_whatever_they_hold) {
  Objective f = objective();
  f.o[1].poison();
  f.lse[1].fill(-kInfinite);
  f.sinks.fill(-kInfinite);
  Array o(DType::fp64, f.dout.shape()), lse(DType::fp64, f.dlse.shape()), dsinks(DType::fp64, {2});
  const std::vector<Outputs> gradients{{}, {o, lse}, {}};
  merge_backward(f.parts(), f.dout, {}, {gradients, dsinks}, f.sinks);
  o.for_each([&](const Dims& at) { EXPECT_EQ(o[at], 0); });
  lse.for_each([&](const Dims& at) { EXPECT_EQ(lse[at], 0); });
  dsinks.for_each([&](const Dims& at) { EXPECT_EQ(dsinks[at], 0); });
}

template <class Call> std::string refusal(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Merge, refusals_name_argument_value_rule_and_nearest) {
  const Array o(DType::fp32, {1, 3, 2, 4}), lse(DType::fp32, {1, 2, 3}), half(DType::fp16, {1, 3, 2, 4}),
      wide(DType::fp32, {1, 3, 2, 5}), one(DType::fp32, {3});
  const auto of = [&](const Outputs& part, const Outputs& out, const Tensor& sinks = {}) {
    return refusal([&] { merge({&part, 1}, out, sinks); });
  };
  EXPECT_EQ(of({o, lse}, {}), "o: not given: this argument is required");
  EXPECT_EQ(of({o, {}}, {o, lse}), "parts[0].lse: not given: this argument is required");
  EXPECT_EQ(of({half, lse}, {o, lse}), "parts[0].o: fp16: must be o's dtype; nearest legal: fp32");
  EXPECT_EQ(of({wide, lse}, {o, lse}),
            "parts[0].o: shape (1, 3, 2, 5): must be o's shape = (1, 3, 2, 4); nearest legal: (1, 3, 2, 4)");
  EXPECT_EQ(of({o, lse}, {one, lse}), "o: shape (3,): must have rank 4 (b, sq, h, dv) or 3 (total_q, h, dv)");
  EXPECT_EQ(of({o, lse}, {o, lse}, one), "sinks: shape (3,): must be (h) = (2,); nearest legal: (2,)");
  Tensor expanded = o;
  expanded.strides[1] = 0;
  EXPECT_EQ(of({o, lse}, {expanded, lse}), "o: strides (24, 0, 4, 1): elements of an output must not share memory");
  const std::array<Outputs, 1> parts{Outputs{o, lse}};
  const std::array<Outputs, 2> two{Outputs{o, lse}, Outputs{}};
  EXPECT_EQ(refusal([&] {
              merge_backward(parts, o, {}, {two, {}});
            }),
            "out.parts: 2 parts: must be as many as parts, or none; nearest legal: 1");
  EXPECT_EQ(refusal([&] { merge_backward(parts, o, {}, {{}, one}); }), "dsinks: given: needs sinks");
}

TEST(Merge, refusals_of_devices_and_streams) {
  const Array o(DType::fp32, {1, 3, 2, 4}), lse(DType::fp32, {1, 2, 3});
  const auto on_gpu = [](Tensor tensor, DType dtype) {
    tensor.device = {DeviceKind::cuda, 0};
    tensor.dtype = dtype;
    return tensor;
  };
  const Outputs host{o, lse}, gpu{on_gpu(o, DType::fp32), on_gpu(lse, DType::fp32)},
      wide{on_gpu(o, DType::fp64), on_gpu(lse, DType::fp64)};
  int stream = 0;
  EXPECT_EQ(refusal([&] {
              merge({&host, 1}, host, {}, &stream);
            }),
            "stream: given: a call on the CPU has none; nearest legal: null");
  EXPECT_EQ(refusal([&] { merge({&host, 1}, gpu); }), "parts[0].o: cpu: must be on cuda:0 with the others");
  EXPECT_EQ(refusal([&] { merge({&wide, 1}, wide); }), "o: fp64: fp64 is for the CPU; nearest legal: fp32");
  EXPECT_EQ(refusal([&] { merge(std::vector<Outputs>(33, gpu), gpu); }),
            "parts: 33 parts: must be at most 32 on a GPU; nearest legal: 32");
  EXPECT_EQ(refusal([&] {
              merge_backward({&host, 1}, o, {}, {}, {}, &stream);
            }),
            "stream: given: a call on the CPU has none; nearest legal: null");
  EXPECT_EQ(refusal([&] {
              merge_backward({&wide, 1}, wide.o, {}, {});
            }),
            "dout: fp64: fp64 is for the CPU; nearest legal: fp32");
  EXPECT_EQ(refusal([&] { merge_backward(std::vector<Outputs>(33, gpu), gpu.o, {}, {}); }),
            "parts: 33 parts: must be at most 32 on a GPU; nearest legal: 32");
}

}  // namespace
}  // namespace narrows::test
