#include "cpu/decode_block.hpp"

#include "cpu/cache.hpp"
#include "cpu/seen.hpp"

#include <algorithm>
#include <array>
#include <cmath>

namespace narrows::cpu {
namespace {

static_assert(kPlacedAhead <= kRowsBeyond);

// A row of the widest V in the widest type: zero has the same bits in all of them.
constexpr std::array<std::byte, kMostValueDim * sizeof(double)> kZeroRow{};

}  // namespace

template <class T>
DecodeBlock<T>::DecodeBlock(const ForwardCall<T>& call, const KvHead& head, Range rows, int thread)
    : Base(call, head, rows, thread),
      q_stride_(vectors(call.problem.head_dim)),
      queries_(call.template scratch<T>(thread, call.layout.queries)),
      converted_(call.template scratch<T>(thread, call.layout.tile)),
      key_rows_(this->pointers_),
      value_rows_(key_rows_ + call.key_block + kRowsBeyond) {}

template <class T> bool DecodeBlock<T>::readable(const View& view, i64 length) const {
  return view.strides[3] == static_cast<i64>(item_size(view.dtype)) && length % call_.kernels.decode.lanes == 0;
}

template <class T> void DecodeBlock<T>::pack_queries() {
  const i64 d = call_.problem.head_dim;
  this->find_queries();
  for (i64 first = 0; first < count(); first += kMostPanelRows) {
    const i64 panel = std::min(kMostPanelRows, count() - first);
    const Rows source = this->query_rows(first, panel);
    for (i64 r = 0; r < panel; ++r) {
      T* const q = queries_ + (first + r) * q_stride_;
      call_.kernels.convert(source.row[r], source.stride, source.dtype, d, q);
      call_.kernels.multiply(q, d, call_.units.sign);
      std::fill(q + d, q + q_stride_, T{0});
    }
  }
  std::fill_n(o_, count() * call_.value_width, T{0});
}

template <class T> void DecodeBlock<T>::attend(Range keys) {
  const i64 block = call_.key_block;
  for (i64 first = keys.begin / block * block; first < keys.end; first += block)
    attend_block(intersect(keys, {first, first + block}), intersect(keys, {first + block, first + 2 * block}));
}

/// `next`: keys that are attended to afterwards.
template <class T> void DecodeBlock<T>::attend_block(Range keys, Range next) {
  if (keys.begin >= keys.end) return;
  find_rows(keys, next);
  // Columns begin at a whole strip: what is added to a row's sum together must not depend on where other rows begin.
  const i64 strip = call_.kernels.columns, begin = keys.begin / strip * strip;
  const Range columns{begin, round_up(keys.end, strip)};
  T* const seen = s_ + (keys.begin - begin);
  score(length(keys), seen);
  for (i64 r = 0; r < count(); ++r) {
    auto& row = rows_[static_cast<std::size_t>(r)];
    T* const s = s_ + r * s_stride_;
    make_logits(call_.buffers, call_.kernels, call_.score_rules, row.rules, row.place, columns, s, this->row_scratch_);
    this->add_weights(row, s, columns, this->output(r));
  }
  if (call_.buffers.mask || call_.buffers.bias) drop_hidden_values(keys, seen);
  accumulate(length(keys), seen);
}

/// Addresses of the block's rows and, to be fetched ahead, of what follows: V after K, the next block's K after V.
template <class T> void DecodeBlock<T>::find_rows(Range keys, Range next) {
  const Buffers& buffers = call_.buffers;
  const auto find = [&](const View& view, Range wanted, const std::byte** rows) {
    key_rows(call_.problem, buffers, view, head_.sequence, wanted, head_.kv_head, rows);
  };
  const i64 here = length(keys), values = std::min(here, kRowsBeyond), later = std::min(length(next), kRowsBeyond);
  find(buffers.k, keys, key_rows_);
  find(buffers.v, keys, value_rows_);
  std::copy_n(value_rows_, values, key_rows_ + here);
  std::fill(key_rows_ + here + values, key_rows_ + here + kRowsBeyond, value_rows_[0]);
  find(buffers.k, {next.begin, next.begin + later}, value_rows_ + here);
  std::fill(value_rows_ + here + later, value_rows_ + here + kRowsBeyond, value_rows_[0]);
}

template <class T> void DecodeBlock<T>::score(i64 keys, T* s) {
  const View& k = call_.buffers.k;
  const i64 d = call_.problem.head_dim;
  const auto& scores = call_.kernels.decode.scores;
  if (readable(k, d)) return scores(queries_, q_stride_, count(), {key_rows_, keys, d, k.dtype}, s, s_stride_);
  for (i64 first = 0; first < keys; first += kConvertedRows)
    scores(queries_, q_stride_, count(), converted(key_rows_ + first, k, std::min(kConvertedRows, keys - first), d),
           s + first, s_stride_);
}

template <class T> void DecodeBlock<T>::accumulate(i64 keys, const T* p) {
  const View& v = call_.buffers.v;
  const i64 dv = call_.problem.value_dim;
  const auto& add = call_.kernels.decode.accumulate;
  if (readable(v, dv)) return add(p, s_stride_, count(), {value_rows_, keys, dv, v.dtype}, o_, call_.value_width);
  for (i64 first = 0; first < keys; first += kConvertedRows)
    add(p + first, s_stride_, count(), converted(value_rows_ + first, v, std::min(kConvertedRows, keys - first), dv),
        o_, call_.value_width);
}

/// Copies of some rows, in whole vectors; of a null row, zeros.
template <class T>
PlacedRows DecodeBlock<T>::converted(const std::byte* const* rows, const View& view, i64 count, i64 length) {
  const i64 width = vectors(length);
  copies_.fill(reinterpret_cast<const std::byte*>(converted_));  // also what there is to fetch ahead
  for (i64 r = 0; r < count; ++r) {
    T* const copy = converted_ + r * width;
    if (rows[r]) call_.kernels.convert(rows[r], view.strides[3], view.dtype, length, copy);
    std::fill(rows[r] ? copy + length : copy, copy + width, T{0});
    copies_[static_cast<std::size_t>(r)] = reinterpret_cast<const std::byte*>(copy);
  }
  return {copies_.data(), count, width, accumulator(view.dtype)};
}

/// A key that no row sees must not reach any, but a weight of 0 times a value of NaN would. Without mask and bias some row
/// sees every key between the first and the last.
template <class T> void DecodeBlock<T>::drop_hidden_values(Range keys, const T* p) {
  const Problem& problem = call_.problem;
  const View& v = call_.buffers.v;
  const i64 group = problem.group(), dv = problem.value_dim;
  const Range heads{head_.kv_head * group, (head_.kv_head + 1) * group};
  std::array<T, kMostValueDim> values;
  const auto weighs_nothing = [&](i64 key) {
    for (i64 r = 0; r < count(); ++r)
      if (p[r * s_stride_ + key] != T{0}) return false;
    return true;
  };
  for (i64 key = 0; key < length(keys); ++key) {
    if (!weighs_nothing(key)) continue;
    call_.kernels.convert(value_rows_[key], v.strides[3], v.dtype, dv, values.data());
    if (std::all_of(values.begin(), values.begin() + dv, [](T value) { return std::isfinite(value); })) continue;
    if (key_is_seen(problem, call_.buffers, call_.kernels, head_.batch, head_.sequence, heads, keys.begin + key))
      continue;
    value_rows_[key] = readable(v, dv) ? kZeroRow.data() : nullptr;
  }
}

template class DecodeBlock<float>;
template class DecodeBlock<double>;

}  // namespace narrows::cpu
