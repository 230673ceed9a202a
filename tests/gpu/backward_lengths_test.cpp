// Gradients of calls whose lengths only the device knows: what a broken rule makes NaN, and what stays as it would be.
#include "core/status.hpp"
#include "tests/gpu/breaches.hpp"

#include <cmath>

namespace narrows::test {
namespace {

using GpuBackwardLengths = GpuTest;
using GpuFamilyBackwardLengths = GpuFamilyTest;

/// O and LSE of a legal call. Deterministic, so that what is as it would be has the same bits.
void make_saved(Varlen& call) {
  call.a.options.deterministic = true;
  DeviceCall gpu(call.a.in(), call.a.out(), call.a.options);
  gpu.run();
  gpu.download();
}

struct Outcome {
  CallStatus status;
  Array dq, dk, dv;
};

Outcome gradients_of(Varlen& call) {
  DeviceBackward gpu(call.a.backward_in(), call.a.gradients(), call.a.options);
  gpu.run();
  gpu.download();
  EXPECT_TRUE(gpu.surroundings_intact());
  return {gpu.status(), call.a.dq, call.a.dk, call.a.dv};
}

void expect_nan(const Array& array, std::int64_t begin, std::int64_t end) {
  array.for_each([&](const Dims& at) {
    if (at[0] < begin || at[0] >= end) return;
    ASSERT_TRUE(std::isnan(array[at])) << "row " << at[0] << " head " << at[1] << " column " << at[2];
  });
}

void expect_same_outside(const Array& array, const Array& legal, std::int64_t begin, std::int64_t end) {
  array.for_each([&](const Dims& at) {
    if (at[0] >= begin && at[0] < end) return;
    ASSERT_EQ(array[at], legal[at]) << "row " << at[0] << " head " << at[1] << " column " << at[2];
  });
}

bool is_bound(const Breaking& breaking) {
  return breaking.lengths == &Varlen::cu_q || breaking.lengths == &Varlen::cu_k;
}

/// With broken bounds no row can be told whose it is.
TEST_P(GpuFamilyBackwardLengths, broken_bounds_make_everything_nan) {
  for (const Breaking& breaking : kBreaking) {
    if (!is_bound(breaking)) continue;
    SCOPED_TRACE(breaking.name);
    Varlen call(family());
    leave_one_breach(call, breaking);
    make_saved(call);
    (call.*breaking.lengths).set({breaking.index}, breaking.value);
    const Outcome run = gradients_of(call);
    expect_status(run.status, breaking.status);
    ASSERT_NO_FATAL_FAILURE(expect_nan(run.dq, 0, 200));
    ASSERT_NO_FATAL_FAILURE(expect_nan(run.dk, 0, 260));
    ASSERT_NO_FATAL_FAILURE(expect_nan(run.dv, 0, 260));
  }
}

TEST_P(GpuFamilyBackwardLengths, a_sequence_that_uses_too_many_rows_is_nan_and_the_others_are_whole) {
  constexpr std::int64_t kQueries[] = {0, 60, 131, 200}, kKeys[] = {0, 90, 150, 260};
  for (const Breaking& breaking : kBreaking) {
    if (is_bound(breaking)) continue;
    SCOPED_TRACE(breaking.name);
    Varlen call(family());
    make_saved(call);
    const Outcome legal = gradients_of(call);
    EXPECT_EQ(legal.status.code, 0);
    (call.*breaking.lengths).set({breaking.index}, breaking.value);
    const Outcome run = gradients_of(call);
    expect_status(run.status, breaking.status);
    const std::int64_t s = breaking.status.sequence;
    ASSERT_NO_FATAL_FAILURE(expect_nan(run.dq, kQueries[s], kQueries[s + 1]));
    ASSERT_NO_FATAL_FAILURE(expect_same_outside(run.dq, legal.dq, kQueries[s], kQueries[s + 1]));
    ASSERT_NO_FATAL_FAILURE(expect_nan(run.dk, kKeys[s], kKeys[s + 1]));
    ASSERT_NO_FATAL_FAILURE(expect_same_outside(run.dk, legal.dk, kKeys[s], kKeys[s + 1]));
    ASSERT_NO_FATAL_FAILURE(expect_nan(run.dv, kKeys[s], kKeys[s + 1]));
    ASSERT_NO_FATAL_FAILURE(expect_same_outside(run.dv, legal.dv, kKeys[s], kKeys[s + 1]));
  }
}

/// A sum over the sequences is wrong as soon as one of them is.
TEST_P(GpuFamilyBackwardLengths, sums_over_sequences_are_nan) {
  for (const Breaking& breaking : kBreaking) {
    SCOPED_TRACE(breaking.name);
    Varlen call(family());
    leave_one_breach(call, breaking);
    const Array slopes(DType::fp32, {2}, {0.25, 0.125}), sinks(DType::fp32, {2}, {0.5, 1});
    call.a.options.alibi_slopes = slopes;
    call.a.options.sinks = sinks;
    if (family() == "sm80") call.give_bias(200, 260);  // of any rows that broken bounds make: one breach
    make_saved(call);
    (call.*breaking.lengths).set({breaking.index}, breaking.value);
    Array dslopes(DType::fp32, {2}), dsinks(DType::fp32, {2}), dbias(DType::fp32, {200, 260});
    for (Array* array : {&dslopes, &dsinks, &dbias}) array->fill(0);
    Gradients wanted;
    wanted.dslopes = dslopes;
    wanted.dsinks = dsinks;
    if (call.bias.tensor().given()) wanted.dbias = dbias;
    DeviceBackward gpu(call.a.backward_in(), wanted, call.a.options);
    gpu.run();
    gpu.download();
    expect_status(gpu.status(), breaking.status);
    for (const std::int64_t h : {0, 1}) EXPECT_TRUE(std::isnan(dslopes[{h}]) && std::isnan(dsinks[{h}])) << h;
    if (call.bias.tensor().given()) {
      EXPECT_TRUE(std::isnan(dbias[{0, 0}]));
    }
    EXPECT_TRUE(gpu.surroundings_intact());
  }
}

/// Broken bounds say of no sequence which rows it has.
TEST_F(GpuBackwardLengths, broken_bounds_make_the_gradients_of_every_sequence_nan) {
  for (const Breaking& breaking : kBreaking) {
    if (!is_bound(breaking)) continue;
    SCOPED_TRACE(breaking.name);
    Varlen call;
    leave_one_breach(call, breaking);
    const Array slopes(DType::fp32, {3, 2}, {0.25, 0.125, 0.5, 0.25, 0.125, 0.5});
    Array bias(DType::fp32, {3, 2, 200, 260}), dslopes(DType::fp32, {3, 2}), dbias(DType::fp32, {3, 2, 200, 260});
    for (Array* array : {&bias, &dslopes, &dbias}) array->fill(0);
    call.a.options.alibi_slopes = slopes;
    call.a.options.bias = bias;
    make_saved(call);
    (call.*breaking.lengths).set({breaking.index}, breaking.value);
    Gradients wanted;
    wanted.dslopes = dslopes;
    wanted.dbias = dbias;
    DeviceBackward gpu(call.a.backward_in(), wanted, call.a.options);
    gpu.run();
    gpu.download();
    expect_status(gpu.status(), breaking.status);
    for (const Array* array : {&dslopes, &dbias})
      for (const double value : array->values()) ASSERT_TRUE(std::isnan(value));
  }
}

TEST_P(GpuFamilyBackwardLengths, check_waits_and_throws_the_words) {
  for (const Breaking& breaking : kBreaking) {
    SCOPED_TRACE(breaking.name);
    Varlen call(family());
    leave_one_breach(call, breaking);
    make_saved(call);
    (call.*breaking.lengths).set({breaking.index}, breaking.value);
    DeviceBackward gpu(call.a.backward_in(), call.a.gradients(), call.a.options);
    gpu.options.check = true;
    const std::string expected = status_text(make_backward(gpu.in, gpu.out, gpu.options).problem, breaking.status);
    try {
      gpu.run();
      ADD_FAILURE() << "not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_value);
      EXPECT_EQ(error.what(), expected);
    }
  }
}

TEST_F(GpuBackwardLengths, an_offset_beyond_32_bits_is_found_where_it_lies) {
  Varlen call;
  make_saved(call);
  const Array offset(DType::int64, {1}, {3 * 4294967296.0});
  call.a.options.dropout = 0.5;
  call.a.options.offset = Number(offset.tensor());
  const Outcome run = gradients_of(call);
  EXPECT_EQ(run.status.code, 11);
  EXPECT_EQ(run.status.value, 3);
  expect_nan(run.dq, 0, 200);
  expect_nan(run.dk, 0, 260);
  expect_nan(run.dv, 0, 260);
}

INSTANTIATE_TEST_SUITE_P(All, GpuFamilyBackwardLengths, kGpuFamilies, family_name);

}  // namespace
}  // namespace narrows::test
