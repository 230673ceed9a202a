// AVX-512 F, DQ, BW and VL: 12 x 2 vectors of accumulators in 32 registers.
#define NARROWS_VECTOR_BYTES 64
#include "cpu/tile_vectors.inl.hpp"

#include "cpu/tile_isa_avx512.inl.hpp"

namespace narrows::cpu {
namespace {

struct Isa : Avx512 {
  static constexpr const char* kName = "avx512";
  static constexpr int kRows = 12;
};

}  // namespace
}  // namespace narrows::cpu

#include "cpu/tile_kernels.inl.hpp"

namespace narrows::cpu {
constinit const InstructionSet kTileKernelsAvx512{kKernels<float>, kKernels<double>};
}  // namespace narrows::cpu
