// Lengths that only the device knows: a sequence that breaks a rule gets NaN, `status` says which and why, the others are as
// they would be, and memory that is not the call's stays untouched.
#include "core/status.hpp"
#include "tests/gpu/breaches.hpp"

#include <cmath>

#include <gmock/gmock.h>

namespace narrows::test {
namespace {

void expect_rows(const Varlen& call, const Array& o, const Array& lse, int sequence, bool broken) {
  constexpr std::int64_t kBounds[] = {0, 60, 131, 200};
  for (std::int64_t row = kBounds[sequence]; row < kBounds[sequence + 1]; ++row)
    for (std::int64_t h = 0; h < 2; ++h) {
      if (broken) {
        ASSERT_TRUE(std::isnan(call.a.lse[{h, row}])) << "sequence " << sequence << " row " << row;
        for (std::int64_t x = 0; x < 40; ++x) ASSERT_TRUE(std::isnan(call.a.o[{row, h, x}])) << row << " " << x;
      } else {
        ASSERT_EQ((call.a.lse[{h, row}]), (lse[{h, row}])) << "sequence " << sequence << " row " << row;
        for (std::int64_t x = 0; x < 40; ++x) ASSERT_EQ((call.a.o[{row, h, x}]), (o[{row, h, x}])) << row << " " << x;
      }
    }
}

using GpuLengths = GpuTest;
using GpuFamilyLengths = GpuFamilyTest;

TEST_P(GpuFamilyLengths, a_sequence_that_breaks_a_rule_is_nan_and_the_others_are_whole) {
  for (const Breaking& breaking : kBreaking) {
    SCOPED_TRACE(breaking.name);
    Varlen call(family());
    leave_one_breach(call, breaking);
    DeviceCall legal(call.a.in(), call.a.out(), call.a.options);
    legal.run();
    legal.download();
    EXPECT_EQ(legal.status().code, 0);
    const Array o = call.a.o, lse = call.a.lse;

    (call.*breaking.lengths).set({breaking.index}, breaking.value);
    DeviceCall gpu(call.a.in(), call.a.out(), call.a.options);
    gpu.run();
    gpu.download();
    expect_status(gpu.status(), breaking.status);
    EXPECT_TRUE(gpu.surroundings_intact());
    for (int sequence = 0; sequence < 3; ++sequence) {
      const bool broken = sequence == breaking.status.sequence;
      if (!broken && sequence < breaking.whole_from) continue;
      ASSERT_NO_FATAL_FAILURE(expect_rows(call, o, lse, sequence, broken));
    }
  }
}

TEST_P(GpuFamilyLengths, check_waits_and_throws_the_words) {
  for (const Breaking& breaking : kBreaking) {
    SCOPED_TRACE(breaking.name);
    Varlen call(family());
    leave_one_breach(call, breaking);
    (call.*breaking.lengths).set({breaking.index}, breaking.value);
    DeviceCall gpu(call.a.in(), call.a.out(), call.a.options);
    gpu.options.check = true;
    const std::string expected = status_text(make_forward(gpu.in, gpu.out, gpu.options).problem, breaking.status);
    for (const bool own_status : {true, false}) {
      if (!own_status) gpu.options.status = {};
      try {
        gpu.run();
        ADD_FAILURE() << "not refused";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::invalid_value);
        EXPECT_EQ(error.what(), expected);
      }
    }
  }
}

TEST_P(GpuFamilyLengths, check_of_a_legal_call_is_silent) {
  Varlen call(family());
  DeviceCall gpu(call.a.in(), call.a.out(), call.a.options);
  gpu.options.check = true;
  EXPECT_NO_THROW(gpu.run());
}

TEST_F(GpuLengths, bias_must_reach_every_sequence) {
  for (const auto& [rows, keys, status] :
       {std::tuple{70, 110, CallStatus{9, 1, 71, 70}}, std::tuple{71, 100, CallStatus{10, 2, 110, 100}}}) {
    Varlen call;
    call.give_bias(rows, keys);
    DeviceCall gpu(call.a.in(), call.a.out(), call.a.options);
    gpu.run();
    gpu.download();
    expect_status(gpu.status(), status);
    EXPECT_TRUE(gpu.surroundings_intact());
    expect_rows(call, {}, {}, status.sequence, true);
    EXPECT_FALSE(std::isnan(call.a.lse[{0, 0}]));
  }
}

TEST_F(GpuLengths, an_offset_beyond_32_bits_is_found_where_it_lies) {
  Varlen call;
  const Array offset(DType::int64, {1}, {3 * 4294967296.0});
  call.a.options.dropout = 0.5;
  call.a.options.offset = Number(offset.tensor());
  DeviceCall gpu(call.a.in(), call.a.out(), call.a.options);
  gpu.run();
  gpu.download();
  EXPECT_EQ(gpu.status().code, 11);
  EXPECT_EQ(gpu.status().value, 3);
  for (int sequence = 0; sequence < 3; ++sequence) expect_rows(call, {}, {}, sequence, true);
}

TEST_F(GpuLengths, lengths_on_the_host_are_refused_by_name) {
  Varlen call;
  DeviceCall gpu(call.a.in(), call.a.out(), call.a.options);
  gpu.options.cu_seqlens_q = call.cu_q;
  try {
    gpu.run();
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), testing::AllOf(testing::HasSubstr("cu_seqlens_q"), testing::HasSubstr("cuda:0")));
  }
}

INSTANTIATE_TEST_SUITE_P(All, GpuFamilyLengths, kGpuFamilies, family_name);

}  // namespace
}  // namespace narrows::test
