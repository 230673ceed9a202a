// The forward kernel of family sm90 for the host, after the constants of its program: its products, its memory, its text.
#include "kernels/ptx_sm90.cuh"

namespace narrows {
inline void multiply_scores(float (&d)[1][kBlockKeys / 8][4], u64 a, u64 b, int adds) {
  multiply_on_host(d, a, b, false, adds, kElement == Element::fp16);
}
inline void multiply_scores(float (&d)[1][kBlockKeys / 8][4], const u32 (&a)[4], u64 b, int adds) {
  multiply_on_host(d, a, b, false, adds, kElement == Element::fp16);
}
inline void multiply_output(float (&d)[1][kValueDim / 8][4], const u32 (&a)[4], u64 b, int adds) {
  multiply_on_host(d, a, b, true, adds, kElement == Element::fp16);
}
}  // namespace narrows

extern "C" {
alignas(1024) char memory[narrows::kSharedBytes];
}
#include "kernels/forward_sm90.cu"
#undef memory
