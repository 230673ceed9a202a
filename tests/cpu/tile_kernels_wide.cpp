// The tile kernels in 64-byte vectors and 12 rows, as AVX-512 has them, for machines that have no AVX-512: the same text but for
// the intrinsics.
#define NARROWS_VECTOR_BYTES 64
#include "cpu/tile_vectors.inl.hpp"

#include "cpu/tile_generic.inl.hpp"

namespace narrows::cpu {
namespace {

struct Isa : GenericVectors {
  static constexpr const char* kName = "wide";
  static constexpr int kRows = 12;
};

}  // namespace
}  // namespace narrows::cpu

#include "cpu/tile_kernels.inl.hpp"

namespace narrows::cpu {
extern const InstructionSet kTileKernelsWide;
constinit const InstructionSet kTileKernelsWide{kKernels<float>, kKernels<double>};
}  // namespace narrows::cpu
