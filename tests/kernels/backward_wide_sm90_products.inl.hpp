// The backward kernel of wide heads of family sm90 for the host, after the constants of its program: its products, its text.
#include "kernels/ptx_sm90.cuh"

namespace narrows {
inline void multiply_scores(float (&d)[1][kBlockQueries / 8][4], u64 a, u64 b, int adds) {
  multiply_on_host(d, a, b, false, adds, kElement == Element::fp16);
}
template <int n> void multiply_sums(float (&d)[1][n][4], u64 a, u64 b, int adds) {
  multiply_on_host(d, a, b, true, adds, kElement == Element::fp16);
}
inline void multiply_gradients(float (&d)[1][8][4], u64 a, u64 b, int adds) {
  multiply_columns_on_host(d, a, b, adds, kElement == Element::fp16);
}
}  // namespace narrows

#include "kernels/backward_wide_sm90.cu"

namespace narrows {
inline void run_kernel(const BackwardSm90Args& args) { backward_wide_sm90(args); }
}  // namespace narrows
