#include "cpu/append.hpp"

#include "cpu/cache.hpp"
#include "cpu/pool.hpp"
#include "cpu/rotary.hpp"

#include <array>
#include <cstring>

namespace narrows::cpu {
namespace {

/// Bits as they are. Both views have the same dtype.
void copy_row(const std::byte* from, const View& source, std::byte* to, const View& target, i64 first, i64 count) {
  const std::size_t item = item_size(source.dtype);
  from += first * source.strides[3];
  to += first * target.strides[3];
  const i64 unit = static_cast<i64>(item);
  if (source.strides[3] == unit && target.strides[3] == unit) {
    std::memcpy(to, from, static_cast<std::size_t>(count) * item);
    return;
  }
  for (i64 x = 0; x < count; ++x) std::memcpy(to + x * target.strides[3], from + x * source.strides[3], item);
}

template <class T> struct Appending {
  const Problem& problem;
  const Buffers& buffers;
  const TileKernels<T>& kernels;

  void key(const std::byte* from, std::byte* to, i64 position) const {
    const View &source = buffers.k_new, &target = buffers.k;
    const i64 rotated = 2 * problem.rotary_pairs;
    copy_row(from, source, to, target, rotated, problem.head_dim - rotated);
    if (rotated == 0) return;
    std::array<T, kMostHeadDim> row;
    kernels.convert(from, source.strides[3], source.dtype, rotated, row.data());
    rotate(problem, buffers, kernels, position, row.data());
    kernels.store(row.data(), T{1}, rotated, to, target.strides[3], target.dtype);
  }

  void head(i64 batch, i64 kv_head) const {
    const Sequence lengths = sequence(problem, buffers, batch);
    const i64 first_row = buffers.cu_seqlens_k_new ? buffers.cu_seqlens_k_new[batch] : 0;
    const i64 first_key = lengths.keys - lengths.new_keys;
    for (i64 t = 0; t < lengths.new_keys; ++t) {
      const auto target = [&](const View& view) {
        return key_row(problem, buffers, view, lengths, first_key + t, kv_head);
      };
      key(buffers.k_new.at(batch, first_row + t, kv_head), target(buffers.k), filled_slots(lengths) + t);
      copy_row(buffers.v_new.at(batch, first_row + t, kv_head), buffers.v_new, target(buffers.v), buffers.v, 0,
               problem.value_dim);
    }
  }
};

}  // namespace

template <class T>
void append_keys(const Problem& problem, const Buffers& buffers, const TileKernels<T>& kernels, int threads) {
  const Appending<T> appending{problem, buffers, kernels};
  parallel_for(problem.batch * problem.kv_heads, threads,
               [&](i64 task, int) { appending.head(task / problem.kv_heads, task % problem.kv_heads); });
}

template void append_keys(const Problem&, const Buffers&, const TileKernels<float>&, int);
template void append_keys(const Problem&, const Buffers&, const TileKernels<double>&, int);

}  // namespace narrows::cpu
