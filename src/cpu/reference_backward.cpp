#include "cpu/reference_results.hpp"

namespace narrows::reference {
namespace {

/// A sum and the same sum over absolute values.
template <class Real> struct Sum {
  Real value = 0;
  double magnitude = 0;
  void add(Real term, double size) {
    value += term;
    magnitude += size;
  }
};

/// Gradients of one row of q, k or v while they are being summed.
template <class Real> struct Rows {
  Rows(Index rows, Index columns) : value(rows, columns), magnitude(rows, columns), columns(columns) {}
  /// row += weight * other, with `size` in the place of weight for the magnitude.
  void add(Index row, Real weight, double size, const Real* other) {
    for (Index c = 0; c < columns; ++c) {
      value[row][c] += weight * other[c];
      magnitude[row][c] += size * std::abs(static_cast<double>(other[c]));
    }
  }
  Matrix<Real> value;
  Matrix<double> magnitude;
  Index columns;
};

/// The inputs of backward beside q, k and v.
struct Saved {
  explicit Saved(const BackwardInputs& in) : o(in.o), lse(in.lse), dout(in.dout), dlse(in.dlse) {}
  View o, lse, dout, dlse;
};

/// Element (head, query of the sequence) of a tensor in lse's shape.
double lse_at(const View& lse, const Sequence& s, Index head, Index query) {
  return lse.rank() == 2 ? lse.at(head, s.first_query + query) : lse.at(s.b, head, query);
}

/// One query's terms of dS = P (dP - D + dLSE).
template <class Real> struct QueryTerms {
  Real lse = 0, dlse = 0;
  Real delta = 0;              // D, the row sum of dO * O
  double delta_magnitude = 0;  // the row sum of |dO * O|
  std::vector<Real> dout;

  QueryTerms(const Call& call, const Sequence& s, Index head, Index query, const Saved& saved) {
    const Place place = call.query_place(s, query);
    lse = static_cast<Real>(lse_at(saved.lse, s, head, query));
    if (saved.dlse.given()) dlse = static_cast<Real>(lse_at(saved.dlse, s, head, query));
    for (Index c = 0; c < call.dv; ++c) {
      dout.push_back(static_cast<Real>(at(saved.dout, place, head, c)));
      const Real product = dout.back() * static_cast<Real>(at(saved.o, place, head, c));
      delta += product;
      delta_magnitude += std::abs(static_cast<double>(product));
    }
  }
  double size() const { return delta_magnitude + std::abs(static_cast<double>(dlse)); }
};

/// e^(x - lse), at most 1: an LSE that was rounded must not make a weight larger.
template <class Real> Real weight(Real x, Real lse) {
  const Real difference = x - lse;
  return std::exp(difference > 0 ? Real{0} : difference);
}

/// Adds a term to the element of dbias that bias(b, head, query, key) was broadcast from.
template <class Real> class BiasGradient {
 public:
  explicit BiasGradient(const Options& options, Result& result)
      : result_(result), given_(options.bias.given()), strides_(row_major(options.bias.shape)) {}

  void add(const Sequence& s, Index head, Index query, Index key, Real term, double size) {
    if (!given_) return;
    const Dims at{s.b, head, query, key};
    Index element = 0;
    for (std::size_t axis = 0; axis < strides_.rank(); ++axis)
      if (result_.shape[axis] != 1) element += strides_[axis] * at[axis + 4 - strides_.rank()];
    double& sum = result_.value[static_cast<std::size_t>(element)];
    sum = static_cast<double>(static_cast<Real>(sum) + term);
    result_.magnitude[static_cast<std::size_t>(element)] += size;
  }

 private:
  Result& result_;
  bool given_;
  Dims strides_;
};

/// What a query head leaves behind beside its rows.
template <class Real> struct HeadSums {
  Sum<Real> slope, sink;
  double largest_logit = 0;
};

/// The gradients that one query head of one sequence adds to.
template <class Real> struct Targets {
  Rows<Real>& dq;  // of this head
  Rows<Real>& dk;  // of its kv head, shared by its group
  Rows<Real>& dv;
  BiasGradient<Real>& dbias;
  HeadSums<Real>& sums;
};

template <class Real>
void backward_row(const Head<Real>& head, Index i, const LogitRow<Real>& row, const QueryTerms<Real>& query,
                  Rounding rounding, Targets<Real>& to) {
  const Call& call = head.call;
  const Real scale = static_cast<Real>(call.scale);
  for (Index j = 0; j < head.sequence.sk; ++j) {
    const std::size_t at = static_cast<std::size_t>(j);
    if (row.logit[at] == -kInfinity<Real>) continue;
    const Real p = rounding(weight(row.logit[at], query.lse));
    const Real keep = static_cast<Real>(head.keep_factor(i, j));
    const Real dp = keep * rounding(dot(query.dout.data(), head.v[j], call.dv));
    const Real ds = rounding(p * (dp - query.delta + query.dlse));
    const double size = static_cast<double>(p) * (std::abs(static_cast<double>(dp)) + query.size());

    const Real dropped = rounding(p * keep);
    to.dv.add(j, dropped, static_cast<double>(dropped), query.dout.data());
    to.dbias.add(head.sequence, head.head, i, j, ds, size);
    const double distance = head.distance(i, j);
    to.sums.slope.add(-static_cast<Real>(distance) * ds, distance * size);

    const Real dscore = scale * row.slope[at] * ds;  // of q.k
    const double dscore_size = std::abs(static_cast<double>(scale * row.slope[at])) * size;
    to.dq.add(i, dscore, dscore_size, head.k[j]);
    to.dk.add(j, dscore, dscore_size, head.q[i]);
  }
}

template <class Real>
void backward_head(const Head<Real>& head, const Saved& saved, Rounding rounding, Targets<Real>& to) {
  LogitRow<Real> row(head.sequence.sk);
  if (std::isfinite(head.sink)) to.sums.largest_logit = std::abs(static_cast<double>(head.sink));
  for (Index i = 0; i < head.sequence.sq; ++i) {
    const QueryTerms<Real> query(head.call, head.sequence, head.head, i, saved);
    if (query.lse == -kInfinity<Real>) continue;  // no key and no sink weighs
    head.logits(i, row);
    to.sums.largest_logit = larger_logit(row, to.sums.largest_logit);
    backward_row(head, i, row, query, rounding, to);
    if (head.sink == -kInfinity<Real>) continue;
    const Real p = weight(head.sink, query.lse);
    to.sums.sink.add(p * (query.dlse - query.delta), static_cast<double>(p) * query.size());
  }
}

/// Writes the sums of one head's rows into a result; `place` maps a row to where it lies.
template <class Real, class PlaceOf>
void store_rows(const Rows<Real>& rows, Index count, Index head, Rounding rounding, double logit, Result& result,
                PlaceOf place) {
  const View value(tensor_of(result.value, result.shape)), magnitude(tensor_of(result.magnitude, result.shape)),
      logits(tensor_of(result.logit, result.shape));
  for (Index row = 0; row < count; ++row) {
    for (Index c = 0; c < rows.columns; ++c) {
      set(value, place(row), head, c, static_cast<double>(rounding(rows.value[row][c])));
      set(magnitude, place(row), head, c, rows.magnitude[row][c]);
      set(logits, place(row), head, c, logit);
    }
  }
}

/// Everything of one kv head of one sequence. `sums`: of each query head of the sequence.
template <class Real>
void backward_group(const Call& call, const Sequence& s, Index kv_head, const Saved& saved, Rounding rounding,
                    BackwardResult& result, BiasGradient<Real>& dbias, HeadSums<Real>* sums) {
  Rows<Real> dk(s.sk, call.d), dv(s.sk, call.dv);
  double largest_logit = 0;
  for (Index h = kv_head * call.group(); h < (kv_head + 1) * call.group(); ++h) {
    Rows<Real> dq(s.sq, call.d);
    Targets<Real> to{dq, dk, dv, dbias, sums[h]};
    backward_head(Head<Real>(call, s, h, rounding), saved, rounding, to);
    largest_logit = std::max(largest_logit, sums[h].largest_logit);
    store_rows(dq, s.sq, h, rounding, sums[h].largest_logit, result.dq,
               [&](Index i) { return call.query_place(s, i); });
  }
  const auto key_place = [&](Index j) { return call.key_place(s, j); };
  store_rows(dk, s.sk, kv_head, rounding, largest_logit, result.dk, key_place);
  store_rows(dv, s.sk, kv_head, rounding, largest_logit, result.dv, key_place);
}

/// Sums over the batch, in its order, into a result of shape (h) or (b, h).
template <class Real, class Pick>
void reduce(const std::vector<HeadSums<Real>>& sums, Index heads, Rounding stored, Result& result, Pick pick) {
  if (result.shape.empty()) return;
  for (std::size_t at = 0; at < sums.size(); ++at) {
    const std::size_t element = result.shape.rank() == 1 ? at % static_cast<std::size_t>(heads) : at;
    const Sum<Real>& sum = pick(sums[at]);
    result.value[element] = static_cast<double>(static_cast<Real>(result.value[element]) + sum.value);
    result.magnitude[element] += sum.magnitude;
    result.logit[element] = std::max(result.logit[element], sums[at].largest_logit);
  }
  for (double& value : result.value) value = stored(value);
}

template <class Real> BackwardResult run_backward(const BackwardInputs& in, const Options& options, Rounding rounding) {
  const Call call(in.q, in.k, in.v, options);
  const Saved saved(in);
  const auto stored = [&](const Tensor& tensor) { return rounding.stored ? Rounding{tensor.dtype} : Rounding{}; };
  BackwardResult result{make_result(in.q.shape, 0), make_result(in.k.shape, 0), make_result(in.v.shape, 0), {}, {}, {}};
  if (options.bias.given()) result.dbias = make_result(options.bias.shape, 0);
  if (options.alibi_slopes.given()) result.dslopes = make_result(options.alibi_slopes.shape, 0);
  if (options.sinks.given()) result.dsinks = make_result(options.sinks.shape, 0);

  BiasGradient<Real> dbias(options, result.dbias);
  std::vector<HeadSums<Real>> sums(static_cast<std::size_t>(call.b * call.h));
  const int threads = options.bias.given() ? 1 : options.threads;  // every head may add to the same element of dbias
  split(call.b * call.hk, threads, [&](Index task) {
    const Sequence s = call.sequence(task / call.hk);
    backward_group(call, s, task % call.hk, saved, rounding, result, dbias, sums.data() + s.b * call.h);
  });

  double largest_logit = 0;
  for (const HeadSums<Real>& sum : sums) largest_logit = std::max(largest_logit, sum.largest_logit);
  std::fill(result.dbias.logit.begin(), result.dbias.logit.end(), largest_logit);
  for (double& value : result.dbias.value) value = stored(options.bias)(value);
  reduce(sums, call.h, stored(options.alibi_slopes), result.dslopes, [](const auto& sum) { return sum.slope; });
  reduce(sums, call.h, stored(options.sinks), result.dsinks, [](const auto& sum) { return sum.sink; });
  return result;
}

/// Fills in o and lse by the same arithmetic where they are not given.
template <class Real> BackwardResult run_with_forward(BackwardInputs in, const Options& options, Rounding rounding) {
  ForwardResult saved;
  if (!in.o.given() || !in.lse.given()) {
    saved = run_forward<Real>({in.q, in.k, in.v}, options, rounding);
    in.o = tensor_of(saved.o.value, saved.o.shape);
    in.lse = tensor_of(saved.lse.value, saved.lse.shape);
  }
  return run_backward<Real>(in, options, rounding);
}

}  // namespace

BackwardResult exact_backward(const BackwardInputs& in, const Options& options) {
  return run_with_forward<double>(in, options, {});
}

BackwardResult plain_backward(const BackwardInputs& in, const Options& options) {
  if (in.q.dtype == DType::fp64) return run_with_forward<double>(in, options, {});
  return run_with_forward<float>(in, options, {in.q.dtype});
}

void backward(const BackwardInputs& in, const Gradients& out, const Options& options) {
  const BackwardResult result = exact_backward(in, options);
  store_result(result.dq, out.dq);
  store_result(result.dk, out.dk);
  store_result(result.dv, out.dv);
  store_result(result.dbias, out.dbias);
  store_result(result.dslopes, out.dslopes);
  store_result(result.dsinks, out.dsinks);
}

}  // namespace narrows::reference
