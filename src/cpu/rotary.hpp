// Rotary position embedding (Su et al., RoFormer, 2021): pairs of a row's elements are turned by an angle that grows with the
// position.
#pragma once

#include "core/problem.hpp"
#include "cpu/tile_kernels.hpp"

#include <array>

namespace narrows::cpu {

inline constexpr std::size_t kMostRotaryPairs = kMostHeadDim / 2;

/// Turns the first 2 * pairs elements of the row by the tables' angles for `position`.
template <class T>
void rotate(const Problem& problem, const Buffers& buffers, const TileKernels<T>& kernels, i64 position, T* row) {
  std::array<T, kMostRotaryPairs> cosine, sine;
  const i64 pairs = problem.rotary_pairs;
  const View &cosines = buffers.rotary_cos, &sines = buffers.rotary_sin;
  kernels.convert(cosines.at(position), cosines.strides[1], cosines.dtype, pairs, cosine.data());
  kernels.convert(sines.at(position), sines.strides[1], sines.dtype, pairs, sine.data());
  const i64 step = problem.rotary_interleaved ? 2 : 1, second = problem.rotary_interleaved ? 1 : pairs;
  for (i64 pair = 0; pair < pairs; ++pair) {
    T& x = row[pair * step];
    T& y = row[pair * step + second];
    const T c = cosine[static_cast<std::size_t>(pair)], s = sine[static_cast<std::size_t>(pair)];
    const T turned = x * c - y * s;
    y = x * s + y * c;
    x = turned;
  }
}

}  // namespace narrows::cpu
