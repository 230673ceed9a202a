#include "cpu/peak.hpp"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "core/error.hpp"
#include "cpu/features.hpp"
#include "cpu/machine.hpp"
#include "cpu/peak_loops.hpp"
#include "cpu/tile_kernels.hpp"

namespace narrows::cpu {
namespace {

TEST(CpuPeak, rates_are_those_of_some_machine) {
  for (const TileKernels<float>* kernels : available_tile_kernels<float>()) {
    for (const DType dtype : {DType::fp32, DType::bf16, DType::fp16}) {
      const double rate = peak_rate(kernels->name, dtype, 1);
      EXPECT_TRUE(std::isfinite(rate));
      EXPECT_GT(rate, 0.001e9) << kernels->name;
    }
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
  if (features().avx2) {
    EXPECT_FLOAT_EQ(kPeakLoopAvx2.run(200), static_cast<float>(chains(kPeakLoopAvx2, 32)));
  }
  if (features().avx512) {
    EXPECT_FLOAT_EQ(kPeakLoopAvx512.run(200), static_cast<float>(chains(kPeakLoopAvx512, 64)));
  }
  // Chain i begins with i, and every round adds a pair's 1/2 + 1/2: two products in each of 16 lanes.
  if (features().avx512bf16) {
    const double count = kPeakLoopAvx512Bf16.flops_per_round / 4 / 16;
    EXPECT_EQ(kPeakLoopAvx512Bf16.run(200), count * (count - 1) / 2 + count * 200);
  }
  // Every round adds 32 products of 1/64 to each of the 256 sums of a tile.
  if (features().amx) {
    EXPECT_EQ(kPeakLoopAmx.run(200), kPeakLoopAmx.flops_per_round / 2 / 32 / 256 * 200 / 2);
  }
#elif defined(__aarch64__)
  EXPECT_FLOAT_EQ(kPeakLoopNeon.run(200), static_cast<float>(chains(kPeakLoopNeon, 16)));
#endif
}

TEST(CpuPeak, read_loops_read_every_word) {
  constexpr int kBlocks = 3;
  constexpr std::size_t kWords = kBlocks * kReadBlock / 8;
  alignas(64) unsigned long long words[kWords];
  std::vector<ReadLoop> loops{kReadLoopPortable};
#if defined(__x86_64__)
  if (features().avx2) loops.push_back(kReadLoopAvx2);
  if (features().avx512) loops.push_back(kReadLoopAvx512);
#elif defined(__aarch64__)
  loops.push_back(kReadLoopNeon);
#endif
  for (const ReadLoop loop : loops) {
    for (std::size_t n = 0; n < kWords; ++n) words[n] = n + 1;
    const unsigned long long all = loop(words, kBlocks);
    for (std::size_t n = 0; n < kWords; ++n) {
      words[n] ^= 1ULL << (n % 64);
      EXPECT_EQ(loop(words, kBlocks), all ^ 1ULL << (n % 64)) << n;
      words[n] ^= 1ULL << (n % 64);
    }
  }
}

TEST(CpuPeak, an_unknown_instruction_set_is_refused_by_name) {
  try {
    peak_rate("mmx", DType::fp32, 1);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "instruction set: mmx: this CPU cannot execute it; nearest legal: portable");
  }
}

TEST(CpuPeak, a_dtype_without_a_loop_is_refused_by_name) {
  try {
    peak_rate("portable", DType::fp64, 1);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "dtype: fp64: has no peak loop; must be fp32, fp16 or bf16; nearest legal: fp32");
  }
}

/// Each set needs those before it, and tile kernels exist for no CPU that lacks the feature of their name.
TEST(CpuFeatures, build_on_one_another) {
  const Features& found = features();
  EXPECT_TRUE(found.avx2 || !found.avx512);
  EXPECT_TRUE(found.avx512 || !found.avx512bf16);
  EXPECT_TRUE(found.avx512bf16 || !found.amx);
  bool avx2 = false, avx512 = false;
  for (const TileKernels<float>* kernels : available_tile_kernels<float>()) {
    const std::string_view name = kernels->name;
    avx2 = avx2 || name == "avx2";
    avx512 = avx512 || name == "avx512";
  }
  EXPECT_EQ(found.avx2, avx2);
  EXPECT_EQ(found.avx512, avx512);
}

TEST(CpuMachine, caches_grow_with_their_level) {
  const std::int64_t first = cache_bytes(1), second = cache_bytes(2), third = cache_bytes(3);
  if (first && second) {
    EXPECT_GT(second, first);
  }
  if (second && third) {
    EXPECT_GT(third, second);
  }
  EXPECT_EQ(cache_bytes(9), 0);
}

TEST(CpuPeak, a_machine_is_measured_once) {
  Machine plain = machine();
  plain.threads = 1;
  const Machine first = measured(plain), second = measured(plain);
  EXPECT_GT(first.flops_per_second, 0);
  EXPECT_GT(first.bf16_flops_per_second, 0);
  EXPECT_GT(first.bytes_per_second, 0);
  EXPECT_EQ(first.flops_per_second, second.flops_per_second);
  EXPECT_EQ(first.bf16_flops_per_second, second.bf16_flops_per_second);
  EXPECT_EQ(first.bytes_per_second, second.bytes_per_second);
  EXPECT_EQ(first.name, plain.name);
}

}  // namespace
}  // namespace narrows::cpu
