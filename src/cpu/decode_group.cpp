#include "cpu/decode_group.hpp"

#include "cpu/cache.hpp"

#include <algorithm>

namespace narrows::cpu {
namespace {

// Keys between asking for a row and reading it.
constexpr i64 kKeysAhead = 16;
static_assert(kKeysAhead <= kRowsBeyond);

}  // namespace

template <class T>
DecodeGroup<T>::DecodeGroup(const ForwardCall<T>& call, std::span<const KvHead> heads, Range rows, int thread)
    : call_(call),
      heads_(heads),
      key_rows_(call.template scratch<const std::byte*>(thread, call.layout.pointers)),
      value_rows_(key_rows_ + call.key_block + kRowsBeyond) {
  for (std::size_t h = 0; h < heads.size(); ++h) blocks_[h].emplace(call, heads[h], rows, thread, static_cast<i64>(h));
}

template <class T> void DecodeGroup<T>::run() {
  attend(head(0).keys());
  for (std::size_t h = 0; h < heads_.size(); ++h) blocks_[h]->finish_rows();
}

template <class T> void DecodeGroup<T>::run_split(i64 split) {
  const Range keys = head(0).keys_of_split(split);
  if (keys.begin >= keys.end) return;
  attend(keys);
  for (std::size_t h = 0; h < heads_.size(); ++h) blocks_[h]->keep_partials(split);
}

template <class T> void DecodeGroup<T>::attend(Range keys) {
  for (std::size_t h = 0; h < heads_.size(); ++h) blocks_[h]->pack_queries();
  const i64 block = call_.key_block;
  for (i64 first = keys.begin / block * block; first < keys.end; first += block)
    attend_block(intersect(keys, {first, first + block}), intersect(keys, {first + block, first + 2 * block}));
}

/// `next`: keys that are attended to afterwards.
template <class T> void DecodeGroup<T>::attend_block(Range keys, Range next) {
  if (keys.begin >= keys.end) return;
  const Problem& problem = call_.problem;
  find_rows(keys, next);
  each_step(length(keys), call_.buffers.k, problem.head_dim, key_rows_,
            [&](DecodeBlock<T>& block, i64 first, std::span<const std::byte*> rows, const LaterRows& later) {
              block.score(keys, first, rows, later);
            });
  for (std::size_t h = 0; h < heads_.size(); ++h) blocks_[h]->weigh(keys);
  each_step(length(keys), call_.buffers.v, problem.value_dim, value_rows_,
            [&](DecodeBlock<T>& block, i64 first, std::span<const std::byte*> rows, const LaterRows& later) {
              block.accumulate(keys, first, rows, later);
            });
}

/// Some keys at a time for one head after the other. Each asks for its share of the keys kKeysAhead further on, for all heads,
/// so that lines are asked for in the order of memory.
template <class T>
template <class Step>
void DecodeGroup<T>::each_step(i64 keys, const View& view, i64 length, const std::byte* const* rows, const Step& step) {
  const i64 heads = static_cast<i64>(heads_.size());
  const i64 row_bytes = (heads - 1) * view.strides[2] + length * static_cast<i64>(item_size(view.dtype));
  std::array<const std::byte*, kKeysTogether> own;
  for (i64 first = 0; first < keys; first += kKeysTogether) {
    const i64 count = std::min(kKeysTogether, keys - first);
    for (i64 h = 0; h < heads; ++h) {
      for (i64 key = 0; key < count; ++key)
        own[static_cast<std::size_t>(key)] = rows[first + key] + h * view.strides[2];
      const Range share{h * count / heads, (h + 1) * count / heads};
      const LaterRows later{rows + first + kKeysAhead + share.begin, narrows::length(share), row_bytes};
      step(head(h), first, {own.data(), static_cast<std::size_t>(count)}, later);
    }
  }
}

/// V follows K, and the next block's K follows V.
template <class T> void DecodeGroup<T>::find_rows(Range keys, Range next) {
  const Buffers& buffers = call_.buffers;
  const auto find = [&](const View& view, Range wanted, const std::byte** rows) {
    key_rows(call_.problem, buffers, view, heads_.front().sequence, wanted, heads_.front().kv_head, rows);
  };
  const i64 here = length(keys), values = std::min(here, kRowsBeyond), later = std::min(length(next), kRowsBeyond);
  find(buffers.k, keys, key_rows_);
  find(buffers.v, keys, value_rows_);
  std::copy_n(value_rows_, values, key_rows_ + here);
  std::fill(key_rows_ + here + values, key_rows_ + here + kRowsBeyond, value_rows_[0]);
  find(buffers.k, {next.begin, next.begin + later}, value_rows_ + here);
  std::fill(value_rows_ + here + later, value_rows_ + here + kRowsBeyond, value_rows_[0]);
}

template class DecodeGroup<float>;
template class DecodeGroup<double>;

}  // namespace narrows::cpu
