// New keys and values go into the cache before anybody attends to them.
#pragma once

#include "core/problem.hpp"
#include "cpu/tile_kernels.hpp"

namespace narrows::cpu {

/// Copies k_new, rotated where the call has rotary tables, and v_new to the slots after those that are filled. Everything
/// about the call has been checked.
template <class T>
void append_keys(const Problem& problem, const Buffers& buffers, const TileKernels<T>& kernels, int threads);

extern template void append_keys(const Problem&, const Buffers&, const TileKernels<float>&, int);
extern template void append_keys(const Problem&, const Buffers&, const TileKernels<double>&, int);

}  // namespace narrows::cpu
