#include "cpu/backward_rows.hpp"

#include "cpu/prefetch.hpp"
#include "cpu/row_logits.hpp"
#include "cpu/seen.hpp"

#include <algorithm>
#include <array>
#include <cmath>

namespace narrows::cpu {
namespace {

/// In four chains: one would wait for every sum before it.
template <class T> double dot(const T* a, const T* b, i64 count) {
  std::array<double, 4> sums{};
  i64 x = 0;
  for (; x + 4 <= count; x += 4)
    for (std::size_t lane = 0; lane < 4; ++lane)
      sums[lane] += double{a[x + static_cast<i64>(lane)]} * double{b[x + static_cast<i64>(lane)]};
  for (; x < count; ++x) sums[0] += double{a[x]} * double{b[x]};
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

template <class T> bool finite_row(const BackwardCall<T>& call, const std::byte* row, const View& view, i64 length) {
  T value = 0;
  for (i64 x = 0; row && x < length; ++x) {
    call.kernels.convert(row + x * view.strides[3], 0, view.dtype, 1, &value);
    if (!std::isfinite(value)) return false;
  }
  return true;
}

}  // namespace

template <class T>
RowTerms<T> row_terms(const BackwardCall<T>& call, const QueryHeads& heads, i64 h, i64 i, T* scratch) {
  const Buffers& buffers = call.buffers;
  const i64 row = heads.sequence.first_query + i, columns = call.problem.value_dim;
  RowTerms<T> terms;
  call.kernels.convert(buffers.lse.at(heads.batch, h, row), 0, buffers.lse.dtype, 1, &terms.lse);
  if (terms.lse == -kInfinity<T>) return terms;
  T* const o = scratch + call.value_width;
  call.kernels.convert(buffers.dout.at(heads.batch, row, h), buffers.dout.strides[3], buffers.dout.dtype, columns,
                       scratch);
  call.kernels.convert(buffers.o.at(heads.batch, row, h), buffers.o.strides[3], buffers.o.dtype, columns, o);
  double sum = dot(scratch, o, columns);
  if (const View& dlse = buffers.dlse) {
    T value = 0;
    call.kernels.convert(dlse.at(heads.batch, h, row), 0, dlse.dtype, 1, &value);
    sum -= double{value};
  }
  terms.delta = static_cast<T>(sum);
  return terms;
}

template <class T>
QueryRows<T>::QueryRows(const BackwardCall<T>& call, std::byte* block)
    : call_(call),
      rows_(reinterpret_cast<GradientRow<T>*>(block + call.query_block_layout.rows)),
      q_(reinterpret_cast<const std::byte**>(block + call.query_block_layout.query_pointers)),
      dout_(reinterpret_cast<const std::byte**>(block + call.query_block_layout.dout_pointers)),
      q_panels_(block + call.query_block_layout.query_panels),
      dout_panels_(block + call.query_block_layout.dout_panels),
      q_strips_(block + call.query_block_layout.query_strips),
      dout_strips_(block + call.query_block_layout.dout_strips) {}

template <class T> void QueryRows<T>::refer(const QueryHeads& heads, Range numbers) {
  heads_ = heads;
  numbers_ = numbers;
}

template <class T> i64 QueryRows<T>::strip_stride() const {
  return round_up(count(), call_.kernels.columns) * call_.kernels.columns;
}

template <class T> void QueryRows<T>::load(const QueryHeads& heads, Range numbers, T* room) {
  const Problem& problem = call_.problem;
  const Buffers& buffers = call_.buffers;
  const Sequence& lengths = heads.sequence;
  refer(heads, numbers);
  for (i64 place = 0; place < count(); ++place) {
    const i64 number = numbers.begin + place;
    if (number + kRowsAhead < numbers.end) ask_for(number + kRowsAhead);
    const i64 i = number / heads.width(), h = heads.heads.begin + number % heads.width();
    Range visible = row_keys(problem.rules.mask, lengths.bounds, i, lengths.shift, lengths.keys);
    RowTerms<T> terms;
    if (visible.begin < visible.end) terms = row_terms(call_, heads, h, i, room);
    if (terms.lse == -kInfinity<T>) visible.end = visible.begin;
    const bool reads = visible.begin < visible.end;
    rows_[place] = {i,
                    h,
                    visible,
                    row_rules(problem, buffers, call_.kernels, heads.batch, h),
                    backward_reference<ScalarMath>(call_.units, terms.lse),
                    terms.delta};
    const i64 row = lengths.first_query + i;
    q_[place] = reads ? buffers.q.at(heads.batch, row, h) : nullptr;
    dout_[place] = reads ? buffers.dout.at(heads.batch, row, h) : nullptr;
  }
  pack();
  const i64 strips = strip_stride() / call_.kernels.columns;
  const bool finite = call_.kernels.all_finite(q_strips_, strips * call_.query_width) &&
                      call_.kernels.all_finite(dout_strips_, strips * call_.value_width);
  if (!finite && drop_hidden_rows()) pack();
}

/// Rows of O and dO; packing asks for those of Q.
template <class T> void QueryRows<T>::ask_for(i64 number) const {
  const i64 row = heads_.sequence.first_query + number / heads_.width(),
            h = heads_.heads.begin + number % heads_.width();
  for (const View* view : {&call_.buffers.o, &call_.buffers.dout})
    prefetch_row<Access::read>(view->at(heads_.batch, row, h), call_.problem.value_dim, view->strides[3]);
}

template <class T> void QueryRows<T>::pack() {
  const Problem& problem = call_.problem;
  const View &q = call_.buffers.q, &dout = call_.buffers.dout;
  const TileKernels<T>& kernels = call_.kernels;
  for (i64 row = 0; row < count(); row += kernels.rows) {
    const i64 rows = std::min<i64>(kernels.rows, count() - row);
    kernels.pack_query({q_ + row, rows, problem.head_dim, q.strides[3], q.dtype}, call_.units.sign,
                       q_panels_ + call_.packed(row * call_.query_depth));
    kernels.pack_query({dout_ + row, rows, problem.value_dim, dout.strides[3], dout.dtype}, T{1},
                       dout_panels_ + call_.packed(row * call_.value_depth));
  }
  kernels.pack_values({q_, count(), problem.head_dim, q.strides[3], q.dtype}, q_strips_);
  kernels.pack_values({dout_, count(), problem.value_dim, dout.strides[3], dout.dtype}, dout_strips_);
}

/// Takes out rows of NaN or infinity to which mask and bias leave no key.
template <class T> bool QueryRows<T>::drop_hidden_rows() {
  const Problem& problem = call_.problem;
  bool dropped = false;
  for (i64 row = 0; row < count(); ++row) {
    if (finite_row(call_, q_[row], call_.buffers.q, problem.head_dim) &&
        finite_row(call_, dout_[row], call_.buffers.dout, problem.value_dim))
      continue;
    if (row_is_seen(problem, call_.buffers, call_.kernels, heads_.batch, heads_.sequence, rows_[row].h, rows_[row].i))
      continue;
    q_[row] = dout_[row] = nullptr;
    dropped = true;
  }
  return dropped;
}

template class QueryRows<float>;
template class QueryRows<double>;
template RowTerms<float> row_terms(const BackwardCall<float>&, const QueryHeads&, i64, i64, float*);
template RowTerms<double> row_terms(const BackwardCall<double>&, const QueryHeads&, i64, i64, double*);

}  // namespace narrows::cpu
