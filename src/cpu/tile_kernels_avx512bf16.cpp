// AVX512-BF16: 12 x 2 vectors of accumulators in 32 registers, two products a lane and instruction.
#define NARROWS_VECTOR_BYTES 64
#include "cpu/tile_vectors.inl.hpp"

#include "cpu/tile_isa_avx512.inl.hpp"

#include "cpu/tile_isa_avx512bf16.inl.hpp"

namespace narrows::cpu {
namespace {

struct Isa : Avx512Bf16 {
  static constexpr const char* kName = "avx512bf16";
  static constexpr int kRows = 12, kDepth = 2;
};

}  // namespace
}  // namespace narrows::cpu

#include "cpu/tile_kernels_pairs.inl.hpp"

namespace narrows::cpu {
constinit const InstructionSet kTileKernelsAvx512Bf16{kKernels<float>, {}};
}  // namespace narrows::cpu
