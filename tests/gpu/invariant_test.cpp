// batch_invariant: a row's bits depend on its query and what it sees, not on the call around it.
#include "tests/gpu/device_call.hpp"

namespace narrows::test {
namespace {

/// Rows [first, first + count) of an axis.
Tensor part(Tensor t, std::size_t axis, std::int64_t first, std::int64_t count) {
  t.data = static_cast<std::byte*>(t.data) + first * t.strides[axis] * static_cast<std::int64_t>(item_size(t.dtype));
  t.shape[axis] = count;
  return t;
}

struct Rows {
  Array o, lse;
};

Rows run(const Inputs& in, const Options& options) {
  const Dims& q = in.q.shape;
  Rows rows{Array(in.q.dtype, {q[0], q[1], q[2], in.v.shape[3]}), Array(DType::fp32, {q[0], q[2], q[1]})};
  DeviceCall gpu(in, {rows.o, rows.lse}, options);
  gpu.run();
  gpu.download();
  return rows;
}

class GpuInvariant : public OnGpu<testing::TestWithParam<DType>> {
 protected:
  static constexpr std::int64_t kBatch = 3, kQueries = 300, kKeys = 420, kHeads = 4;

  void SetUp() override {
    OnGpu::SetUp();
    if (IsSkipped()) return;
    a_ = Attention({kBatch, kQueries, kKeys, kHeads, 2, 64, 72}, GetParam());
    a_.options.causal = Causal::bottom_right;
    a_.options.batch_invariant = true;
    a_.options.family = "sm80";
    whole_ = run(a_.in(), a_.options);
  }
  /// Rows of a call on batch row b whose first query is the whole's `first`.
  void expect_rows(const Rows& rows, std::int64_t b, std::int64_t first) const {
    rows.lse.for_each([&](const Dims& at) {
      ASSERT_EQ(rows.lse[at], (whole_.lse[{b, at[1], first + at[2]}]))
          << "row " << at[2] << " of " << rows.lse.shape()[2];
    });
    rows.o.for_each([&](const Dims& at) {
      ASSERT_EQ(rows.o[at], (whole_.o[{b, first + at[1], at[2], at[3]}]))
          << "row " << at[1] << " of " << rows.o.shape()[1];
    });
  }
  Attention a_;
  Rows whole_;
};

/// Bottom-right: the last queries see what they see in the whole call, wherever they stand in their block.
TEST_P(GpuInvariant, bits_do_not_depend_on_batch_or_on_the_other_queries) {
  for (std::int64_t b = 0; b < kBatch; ++b)
    for (const std::int64_t count : {std::int64_t{1}, std::int64_t{7}, std::int64_t{64}, std::int64_t{129}, kQueries}) {
      const std::int64_t first = kQueries - count;
      const Inputs in{part(part(a_.q, 0, b, 1), 1, first, count), part(a_.k, 0, b, 1), part(a_.v, 0, b, 1)};
      ASSERT_NO_FATAL_FAILURE(expect_rows(run(in, a_.options), b, first));
    }
}

/// The first queries on the first keys alone, where these are all that they saw.
TEST_P(GpuInvariant, bits_do_not_depend_on_keys_that_are_not_seen) {
  for (const std::int64_t hidden : {1, 60, 200}) {
    const std::int64_t count = kQueries - hidden;
    const Inputs in{part(part(a_.q, 0, 1, 1), 1, 0, count), part(part(a_.k, 0, 1, 1), 1, 0, kKeys - hidden),
                    part(part(a_.v, 0, 1, 1), 1, 0, kKeys - hidden)};
    ASSERT_NO_FATAL_FAILURE(expect_rows(run(in, a_.options), 1, 0));
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuInvariant, testing::Values(DType::bf16, DType::fp16, DType::fp32),
                         [](const testing::TestParamInfo<DType>& info) { return std::string(name(info.param)); });

}  // namespace
}  // namespace narrows::test
