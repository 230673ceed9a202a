// What a kernel finds reads like what the host would have said of the same values.
#include "core/status.hpp"

#include "tests/core/call.hpp"

#include <gmock/gmock.h>

#include <limits>

namespace narrows::test {
namespace {

using ::testing::StartsWith;

CallStatus found(const Breach& breach, i32 sequence) {
  return {static_cast<i32>(breach.code), sequence, breach.value, breach.limit};
}

/// The first breach in the order in which the host looks.
CallStatus first_breach(StatusCode start, const std::vector<std::int32_t>& bounds, i32 rows) {
  for (std::size_t s = 0; s + 1 < bounds.size(); ++s) {
    const Breach breach = bounds_breach(start, bounds[s], bounds[s + 1], rows, s == 0);
    if (breach.code != StatusCode::kept) return found(breach, static_cast<i32>(s));
  }
  return {};
}

TEST(Status, bounds_read_as_the_hosts) {
  const std::vector<std::int32_t> legal_q{0, 4, 10}, legal_k{0, 8, 14};
  const auto expect_same = [&](const std::vector<std::int32_t>& bounds, bool keys) {
    TestCall call = TestCall::varlen();
    Ints q(keys ? legal_q : bounds, {3}), k(keys ? bounds : legal_k, {3});
    call.options.cu_seqlens_q = q;
    call.options.cu_seqlens_k = k;
    const CallStatus status =
        first_breach(keys ? StatusCode::cu_seqlens_k_start : StatusCode::cu_seqlens_q_start, bounds, keys ? 14 : 10);
    ASSERT_NE(status.code, 0);
    const std::string host = call.refusal();
    ASSERT_FALSE(host.empty());
    EXPECT_EQ(status_text({}, status), host + " (" + Problem{}.text() + ")");
  };
  for (const bool keys : {false, true}) {
    expect_same({1, 4, 10}, keys);
    expect_same({-1, 4, 10}, keys);
    expect_same({0, 4, 3}, keys);
    expect_same({0, -2, 3}, keys);
    expect_same({0, 4, 15}, keys);
    expect_same({0, 4, std::numeric_limits<std::int32_t>::max()}, keys);
  }
}

TEST(Status, a_later_sequence_that_begins_below_0) {
  const CallStatus status = found(bounds_breach(StatusCode::cu_seqlens_k_start, -7, 3, 10, false), 2);
  EXPECT_THAT(status_text({}, status), StartsWith("cu_seqlens_k[2]: -7: must be >= 0; nearest legal: 0 (forward "));
}

TEST(Status, used_rows_read_as_the_hosts) {
  TestCall call = TestCall::dense();
  const auto expect_same = [&](StatusCode code, std::int32_t value, i32 length, Tensor Options::*member) {
    Ints used{0, value};
    call.options = {};
    call.options.*member = used;
    EXPECT_EQ(status_text({}, found(used_breach(code, value, length), 1)),
              call.refusal() + " (" + Problem{}.text() + ")");
  };
  expect_same(StatusCode::seqused_q, 6, 5, &Options::seqused_q);
  expect_same(StatusCode::seqused_q, -1, 5, &Options::seqused_q);
  expect_same(StatusCode::seqused_k, 8, 7, &Options::seqused_k);
  expect_same(StatusCode::seqused_k, std::numeric_limits<std::int32_t>::min(), 7, &Options::seqused_k);
}

TEST(Status, reach_names_what_is_too_small) {
  const CallStatus rows = found(reach_breach(StatusCode::score_rows, 9, 6), 3);
  const CallStatus keys = found(reach_breach(StatusCode::score_keys, 9, 8), 3);
  Problem problem;
  problem.bias.given = true;
  EXPECT_THAT(status_text(problem, rows),
              StartsWith("bias: its sq axis is 6: sequence 3 needs 9; nearest legal: 1 or 9 ("));
  problem.mask.given = true;
  EXPECT_THAT(status_text(problem, keys), StartsWith("bias or mask: its sk axis is 8: sequence 3 needs 9;"));
  problem.bias.given = false;
  EXPECT_THAT(status_text(problem, keys), StartsWith("mask: its sk axis is 8:"));
}

TEST(Status, an_offset_beyond_32_bits) {
  const Breach breach = offset_breach(u64{3} << 32 | 5);
  EXPECT_EQ(breach.value, 3);
  EXPECT_THAT(status_text({}, found(breach, 0)),
              StartsWith("offset: 12884901888 or more: must be <= 4294967295; nearest legal: 4294967295 ("));
  EXPECT_THAT(status_text({}, found(offset_breach(~u64{0}), 0)), StartsWith("offset: 18446744069414584320 or more:"));
}

TEST(Status, what_keeps_the_rules_has_no_breach) {
  EXPECT_EQ(bounds_breach(StatusCode::cu_seqlens_q_start, 0, 0, 0, true).code, StatusCode::kept);
  EXPECT_EQ(bounds_breach(StatusCode::cu_seqlens_q_start, 3, 3, 3, false).code, StatusCode::kept);
  EXPECT_EQ(used_breach(StatusCode::seqused_k, 0, 0).code, StatusCode::kept);
  EXPECT_EQ(used_breach(StatusCode::seqused_k, 7, 7).code, StatusCode::kept);
  EXPECT_EQ(reach_breach(StatusCode::score_keys, 8, 8).code, StatusCode::kept);
  EXPECT_EQ(offset_breach(0xFFFFFFFF).code, StatusCode::kept);
}

TEST(Status, codes_that_no_kernel_writes) {
  for (const i32 code : {0, 22, -1, 1 << 30}) EXPECT_THROW(status_text({}, {code, 0, 0, 0}), Error) << code;
}

TEST(Status, caches_read_as_the_hosts) {
  Problem problem;
  problem.capacity = 320;
  problem.rotary_pairs = 8;
  const auto said = [&](const Breach& breach) { return status_text(problem, found(breach, 1)); };
  EXPECT_THAT(said({StatusCode::cu_seqlens_k_new_order, 3, 5}),
              StartsWith("cu_seqlens_k_new[2]: 3: must be >= the bound before it, 5; nearest legal: 5 ("));
  EXPECT_THAT(said(value_breach(StatusCode::cache_seqlens, 321, 320)),
              StartsWith("cache_seqlens[1]: 321: must be in [0, 320], the cache's capacity; nearest legal: 320 ("));
  EXPECT_THAT(said(value_breach(StatusCode::cache_batch_idx, -2, 4)),
              StartsWith("cache_batch_idx[1]: -2: must be in [0, 4], the cache's rows; nearest legal: 0 ("));
  EXPECT_THAT(said(value_breach(StatusCode::leftpad, 50, 40)),
              StartsWith("leftpad[1]: 50: must be <= cache_seqlens[1] = 40; nearest legal: 40 ("));
  EXPECT_THAT(said(value_breach(StatusCode::leftpad, -1, 40)),
              StartsWith("leftpad[1]: -1: must be in [0, 320], the cache's capacity; nearest legal: 0 ("));
  EXPECT_THAT(
      said({StatusCode::capacity, 319, 318}),
      StartsWith("cache_seqlens[1]: 319: 2 new keys do not fit in the cache's capacity, 320; nearest legal: 318 "));
  EXPECT_THAT(
      said(value_breach(StatusCode::block_table, 60, 59)),
      StartsWith("block_table of sequence 1: 60: must be in [0, 59]: a key that is seen or appended lies in this "
                 "page; nearest legal: 59 ("));
  EXPECT_THAT(said({StatusCode::rotary_base, -4, 0}),
              StartsWith("rotary_base[1]: -4: must be >= 0; nearest legal: 0 ("));
  EXPECT_THAT(
      said({StatusCode::rotary_reach, 41, 40}),
      StartsWith("rotary_cos: shape (40, 8): sequence 1 rotates position 40: needs that many rows and one more; "
                 "nearest legal: 41 ("));
}

}  // namespace
}  // namespace narrows::test
