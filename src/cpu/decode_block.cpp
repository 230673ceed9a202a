#include "cpu/decode_block.hpp"

#include "cpu/seen.hpp"

#include <algorithm>
#include <cmath>

namespace narrows::cpu {
namespace {

// A row of the widest V in the widest type: zero has the same bits in all of them.
constexpr std::array<std::byte, kMostValueDim * sizeof(double)> kZeroRow{};

}  // namespace

template <class T>
DecodeBlock<T>::DecodeBlock(const ForwardCall<T>& call, const KvHead& head, Range rows, int thread, i64 slot)
    : Base(call, head, rows, thread, slot),
      q_stride_(vectors(call.problem.head_dim)),
      queries_(reinterpret_cast<T*>(this->q_)),
      converted_(call.template scratch<T>(thread, call.layout.tile)) {}

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

template <class T>
void DecodeBlock<T>::score(Range block, i64 first, std::span<const std::byte* const> rows, const LaterRows& later) {
  const PlacedRows keys = placed(call_.buffers.k, call_.problem.head_dim, rows, later);
  call_.kernels.decode.scores(queries_, q_stride_, count(), keys, scores(block) + first, s_stride_);
}

template <class T> void DecodeBlock<T>::weigh(Range block) {
  const i64 strip = call_.kernels.columns;
  const Range columns{block.begin / strip * strip, round_up(block.end, strip)};
  for (i64 r = 0; r < count(); ++r) {
    auto& row = rows_[static_cast<std::size_t>(r)];
    T* const s = s_ + r * s_stride_;
    make_logits(call_.buffers, call_.kernels, call_.score_rules, row.rules, row.place, columns, s, this->row_scratch_);
    this->add_weights(row, s, columns, this->output(r));
  }
}

template <class T>
void DecodeBlock<T>::accumulate(Range block, i64 first, std::span<const std::byte*> rows, const LaterRows& later) {
  const T* const p = scores(block) + first;
  if (call_.buffers.mask || call_.buffers.bias || head_.sequence.bounds.given())
    drop_hidden_values(block.begin + first, p, rows);
  const PlacedRows values = placed(call_.buffers.v, call_.problem.value_dim, rows, later);
  call_.kernels.decode.accumulate(p, s_stride_, count(), values, o_, call_.value_width);
}

/// The rows, or copies of them in whole vectors; of a null row, zeros.
template <class T>
PlacedRows DecodeBlock<T>::placed(const View& view, i64 length, std::span<const std::byte* const> rows,
                                  const LaterRows& later) {
  const i64 number = static_cast<i64>(rows.size());
  if (readable(view, length)) return {rows.data(), number, length, view.dtype, later};
  const i64 width = vectors(length);
  T* copy = converted_;
  for (std::size_t r = 0; r < rows.size(); ++r, copy += width) {
    if (rows[r]) call_.kernels.convert(rows[r], view.strides[3], view.dtype, length, copy);
    std::fill(rows[r] ? copy + length : copy, copy + width, T{0});
    copies_[r] = reinterpret_cast<const std::byte*>(copy);
  }
  return {copies_.data(), number, width, accumulator(view.dtype), later};
}

/// A key that no row sees must not reach any, but a weight of 0 times a value of NaN would. Without mask, bias and bounds
/// of rows some row sees every key between the first and the last.
template <class T>
void DecodeBlock<T>::drop_hidden_values(i64 first_key, const T* p, std::span<const std::byte*> rows) {
  const Problem& problem = call_.problem;
  const View& v = call_.buffers.v;
  const i64 group = problem.group(), dv = problem.value_dim;
  const Range heads{head_.kv_head * group, (head_.kv_head + 1) * group};
  std::array<T, kMostValueDim> values;
  const auto weighs_nothing = [&](std::size_t key) {
    for (i64 r = 0; r < count(); ++r)
      if (p[r * s_stride_ + static_cast<i64>(key)] != T{0}) return false;
    return true;
  };
  for (std::size_t key = 0; key < rows.size(); ++key) {
    if (!weighs_nothing(key)) continue;
    call_.kernels.convert(rows[key], v.strides[3], v.dtype, dv, values.data());
    if (std::all_of(values.begin(), values.begin() + dv, [](T value) { return std::isfinite(value); })) continue;
    if (key_is_seen(problem, call_.buffers, call_.kernels, head_.batch, head_.sequence, heads,
                    first_key + static_cast<i64>(key)))
      continue;
    rows[key] = readable(v, dv) ? kZeroRow.data() : nullptr;
  }
}

template class DecodeBlock<float>;
template class DecodeBlock<double>;

}  // namespace narrows::cpu
