// prepare checks what forward would; on the CPU that is all it does.
#include "tests/core/call.hpp"

namespace narrows::test {
namespace {

TEST(Prepare, a_cpu_call_is_checked_and_needs_no_data) {
  TestCall call = TestCall::dense();
  EXPECT_NO_THROW(prepare(call.in, call.options));
  for (Tensor* tensor : {&call.in.q, &call.in.k, &call.in.v}) tensor->data = nullptr;
  EXPECT_NO_THROW(prepare(call.in, call.options));
  call.options.softcap = -1;
  try {
    prepare(call.in, call.options);
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "softcap: -1: must be finite and >= 0 (0 = off); nearest legal: 0");
  }
}

TEST(Prepare, a_cpu_backward_is_checked_and_needs_no_data) {
  TestCall call = TestCall::dense();
  for (Tensor* tensor : {&call.in.q, &call.in.k, &call.in.v}) tensor->data = nullptr;
  EXPECT_NO_THROW(prepare_backward(call.in, call.options));
  Ints lengths({5, 5});
  call.options.cache_seqlens = lengths;
  try {
    prepare_backward(call.in, call.options);
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "backward: a cache call: cache calls are forward only");
  }
}

TEST(Prepare, a_forced_family_that_does_not_take_the_call_is_refused) {
  TestCall call = TestCall::dense();
  for (Tensor* tensor : {&call.in.q, &call.in.k, &call.in.v}) tensor->device = {DeviceKind::cuda, 0};
  call.options.family = "cpu";
  EXPECT_THROW(prepare(call.in, call.options), Error);
}

}  // namespace
}  // namespace narrows::test
