// The table of an instruction set's operations: the last part of its text.

namespace narrows::cpu {
namespace {

template <class T>
constexpr TileKernels<T> kKernels{Isa::kName,
                                  Isa::kRows,
                                  kColumns<T>,
                                  kDepth,
                                  kOperand<T>,
                                  pack_query<T>,
                                  pack_keys<T>,
                                  pack_values<T>,
                                  convert<T>,
                                  all_finite<T>,
                                  scores<T>,
                                  logits<T>,
                                  hide<T>,
                                  maximum<T>,
                                  weights<T>,
                                  multiply<T>,
                                  accumulate<T>,
                                  keep_bits,
                                  softcap_derivatives<T>,
                                  gradients<T>,
                                  distance_sum<T>,
                                  multiply_each<T>,
                                  narrow<T>,
                                  transposed<T>,
                                  accumulate_transposed<T>,
                                  store<T>,
                                  kDecodeKernels<T>};

}  // namespace
}  // namespace narrows::cpu
