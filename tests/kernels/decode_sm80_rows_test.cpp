// As decode_sm80_test.cpp, with 16 packed rows in a thread block, of which threads and warps join two at a time.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <random>
#include <utility>

#include "tests/kernels/device/device.hpp"

#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
// Their names have no namespace.
#define decode_sm80 decode_sm80_of_16_rows
#define append_sm80 append_sm80_of_16_rows

namespace decode_of_16_rows {
#include "shared/decode_args.h"

namespace narrows {
[[maybe_unused]] constexpr Element kElement = Element::fp32, kBiasElement = Element::fp32;
[[maybe_unused]] constexpr int kHeadDim = 32, kValueDim = 32, kBlockQueries = 16, kBlockKeys = 16, kWarps = 2,
                               kThreads = 64, kCopyBytes = 16, kBlocksOfMultiprocessor = 1;
[[maybe_unused]] constexpr bool kNatural = false, kSoftcap = false, kAlibi = false, kBias = false, kMask = false,
                                kDropout = false, kKeepsQueries = true, kTurnsQueries = false;
}  // namespace narrows

#include "tests/kernels/decode_sm80.inl.hpp"

namespace narrows {

/// Of 14 and of 6 packed rows, in as many pieces as the call asks for, in stretches and alike.
TEST(KernelDecodeSm80Rows, parts_of_two_rows_at_a_time) {
  static_assert(kJoinRows == 2);
  for (const i32 queries : {7, 3})
    for (const i32 splits : {0, 5}) {
      SCOPED_TRACE(testing::Message() << queries << " queries, " << splits << " splits");
      CachedCall call({0, 120, 17}, queries, 0, true);
      call.args.visibility = make_mask(-1, 0, true, 0);
      call.args.splits = splits;
      call.run(4);
      ASSERT_NO_FATAL_FAILURE(expect_all(call));
    }
  for (const std::vector<i32>& lengths : {std::vector<i32>{70, 65, 73}, {1, 130, 17}}) {
    CachedCall plain(lengths, 7, 2);
    plain.args.visibility = make_mask(-1, 0, true, 0);
    plain.lines = kKvHeads;
    plain.run(12, true);
    ASSERT_NO_FATAL_FAILURE(expect_all(plain));
  }
}

}  // namespace narrows
}  // namespace decode_of_16_rows
