// A kernel of a few lines for tests of what compiles, keeps and loads kernels.
#pragma once

#include <array>
#include <string>

#include <gtest/gtest.h>

#include "cuda/compile.hpp"

namespace narrows::cuda {

inline constexpr std::array kSmallSources{SourceFile{"kernels/small.cu",
                                                     "#include \"config.cuh\"\n#include \"kernels/small.cuh\"\n"
                                                     "extern \"C\" __global__ void small(float* out) {\n"
                                                     "  __shared__ float kept[kSize];\n"
                                                     "  kept[threadIdx.x] = out[threadIdx.x];\n"
                                                     "  __syncthreads();\n"
                                                     "  out[threadIdx.x] = twice(kept[kSize - 1 - threadIdx.x]);\n}\n"},
                                          SourceFile{"kernels/small.cuh",
                                                     "#include \"shared/number.h\"\n"
                                                     "__device__ inline float twice(float x) { return kTwo * x; }\n"},
                                          SourceFile{"shared/number.h", "constexpr float kTwo = 2;\n"},
                                          SourceFile{"shared/other.h", "constexpr float kOther = 3;\n"}};

inline Program small_program(int size = 256) {
  return {"small.cu", "small", "constexpr int kSize = " + std::to_string(size) + ";\n", false};
}

/// Why this machine compiles nothing; empty where it does.
inline std::string no_compiler() { return find_compiler().absence; }

}  // namespace narrows::cuda
