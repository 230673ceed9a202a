#include "cpu/backward_rows.hpp"

#include "cpu/row_logits.hpp"
#include "cpu/seen.hpp"

#include <algorithm>
#include <cmath>

namespace narrows::cpu {
namespace {

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
  double sum = 0;
  for (i64 x = 0; x < columns; ++x) sum += double{scratch[x]} * double{o[x]};
  if (const View& dlse = buffers.dlse) {
    T value = 0;
    call.kernels.convert(dlse.at(heads.batch, h, row), 0, dlse.dtype, 1, &value);
    sum -= double{value};
  }
  terms.delta = static_cast<T>(sum);
  return terms;
}

template <class T>
QueryRows<T>::QueryRows(const BackwardCall<T>& call, int thread)
    : call_(call),
      rows_(call.template scratch<GradientRow<T>>(thread, call.layout.rows)),
      q_(call.template scratch<const std::byte*>(thread, call.layout.query_pointers)),
      dout_(call.template scratch<const std::byte*>(thread, call.layout.dout_pointers)),
      q_panels_(call.template scratch<Packed>(thread, call.layout.query_panels)),
      dout_panels_(call.template scratch<Packed>(thread, call.layout.dout_panels)),
      q_strips_(call.template scratch<Packed>(thread, call.layout.query_strips)),
      dout_strips_(call.template scratch<Packed>(thread, call.layout.dout_strips)),
      terms_(call.template scratch<T>(thread, call.layout.terms)) {}

template <class T> i64 QueryRows<T>::strip_stride() const {
  return round_up(count(), call_.kernels.columns) * call_.kernels.columns;
}

template <class T> void QueryRows<T>::load(const QueryHeads& heads, Range numbers) {
  const Problem& problem = call_.problem;
  const Buffers& buffers = call_.buffers;
  const Sequence& lengths = heads.sequence;
  heads_ = heads;
  numbers_ = numbers;
  for (i64 place = 0; place < count(); ++place) {
    const i64 number = numbers.begin + place;
    const i64 i = number / heads.width(), h = heads.heads.begin + number % heads.width();
    Range visible = visible_keys(problem.rules.mask, i + lengths.shift, lengths.keys);
    RowTerms<T> terms;
    if (visible.begin < visible.end) terms = row_terms(call_, heads, h, i, terms_);
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
