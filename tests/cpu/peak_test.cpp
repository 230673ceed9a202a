#include "cpu/peak.hpp"

#include <cmath>

#include <gtest/gtest.h>

#include "core/error.hpp"
#include "cpu/machine.hpp"
#include "cpu/peak_loops.hpp"
#include "cpu/tile_kernels.hpp"

namespace narrows::cpu {
namespace {

TEST(CpuPeak, rates_are_those_of_some_machine) {
  for (const TileKernels<float>* kernels : available_tile_kernels<float>()) {
    const double rate = fma_rate(kernels->name, 1);
    EXPECT_TRUE(std::isfinite(rate));
    EXPECT_GT(rate, 0.1e9) << kernels->name;
  }
  const double bytes = read_rate(2);
  EXPECT_TRUE(std::isfinite(bytes));
  EXPECT_GT(bytes, 0.01e9);
}

/// sum = sum / 2 + 1/2 tends to 1 in every chain, and run() adds up one lane of each: their number must come out.
TEST(CpuPeak, loops_compute_what_they_count) {
  const auto chains = [](const PeakLoop& loop, double vector_bytes) {
    return loop.flops_per_round * 4 / 2 / vector_bytes;
  };
  EXPECT_FLOAT_EQ(kPeakLoopPortable.run(200), static_cast<float>(chains(kPeakLoopPortable, 16)));
#if defined(__x86_64__)
  for (const TileKernels<float>* kernels : available_tile_kernels<float>()) {
    const std::string_view name = kernels->name;
    if (name == "avx2") {
      EXPECT_FLOAT_EQ(kPeakLoopAvx2.run(200), static_cast<float>(chains(kPeakLoopAvx2, 32)));
    } else if (name == "avx512") {
      EXPECT_FLOAT_EQ(kPeakLoopAvx512.run(200), static_cast<float>(chains(kPeakLoopAvx512, 64)));
    }
  }
#endif
}

TEST(CpuPeak, an_unknown_instruction_set_is_refused_by_name) {
  try {
    fma_rate("mmx", 1);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "instruction set: mmx: this CPU cannot execute it; nearest legal: portable");
  }
}

TEST(CpuPeak, a_machine_is_measured_once) {
  Machine plain = machine();
  plain.threads = 1;
  const Machine first = measured(plain), second = measured(plain);
  EXPECT_GT(first.flops_per_second, 0);
  EXPECT_GT(first.bytes_per_second, 0);
  EXPECT_EQ(first.flops_per_second, second.flops_per_second);
  EXPECT_EQ(first.bytes_per_second, second.bytes_per_second);
  EXPECT_EQ(first.name, plain.name);
}

}  // namespace
}  // namespace narrows::cpu
