// Whether a key or a query row takes part at all, by the rules, the mask and the bias. Slow: asked only about rows that hold
// NaN or infinity, which a weight of 0 would not keep out of a product.
#pragma once

#include "core/problem.hpp"
#include "cpu/tile_kernels.hpp"

namespace narrows::cpu {

/// One pair within the rules' range.
template <class T> bool weighs(const Buffers& buffers, const TileKernels<T>& kernels, i64 batch, i64 h, i64 i, i64 j) {
  const View &mask = buffers.mask, &bias = buffers.bias;
  if (mask && *mask.at(batch, h, i, j) == std::byte{0}) return false;
  if (!bias) return true;
  T added;
  kernels.convert(bias.at(batch, h, i, j), 0, bias.dtype, 1, &added);
  return added != -kInfinity<T>;
}

template <class T>
bool key_is_seen(const Problem& problem, const Buffers& buffers, const TileKernels<T>& kernels, i64 batch,
                 const Sequence& sequence, Range heads, i64 j) {
  const Range rows = visible_queries(problem.rules.mask, j, sequence.queries, sequence.shift);
  for (i64 i = rows.begin; i < rows.end; ++i) {
    const Range keys = bounded(sequence.bounds, i, {j, j + 1});
    if (keys.begin == keys.end) continue;
    for (i64 h = heads.begin; h < heads.end; ++h)
      if (weighs(buffers, kernels, batch, h, i, j)) return true;
  }
  return false;
}

template <class T>
bool row_is_seen(const Problem& problem, const Buffers& buffers, const TileKernels<T>& kernels, i64 batch,
                 const Sequence& sequence, i64 h, i64 i) {
  const Range keys = row_keys(problem.rules.mask, sequence.bounds, i, sequence.shift, sequence.keys);
  for (i64 j = keys.begin; j < keys.end; ++j)
    if (weighs(buffers, kernels, batch, h, i, j)) return true;
  return false;
}

}  // namespace narrows::cpu
