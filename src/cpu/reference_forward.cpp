#include "cpu/reference_results.hpp"

namespace narrows::reference {
namespace {

/// The results of a forward call, addressed by (sequence, head, query).
struct ForwardViews {
  explicit ForwardViews(ForwardResult& result)
      : o(tensor_of(result.o.value, result.o.shape)),
        o_magnitude(tensor_of(result.o.magnitude, result.o.shape)),
        o_logit(tensor_of(result.o.logit, result.o.shape)) {}
  View o, o_magnitude, o_logit;
};

/// Softmax over one row's logits and the sink. Returns the log-sum-exp, -inf where nothing weighs.
template <class Real> Real softmax(const std::vector<Real>& logits, Real sink, std::vector<Real>& p) {
  Real largest = sink;
  for (const Real x : logits)
    if (x > largest) largest = x;

  Real sum = sink == -kInfinity<Real> ? 0 : std::exp(sink - largest);
  for (std::size_t j = 0; j < logits.size(); ++j) {
    p[j] = logits[j] == -kInfinity<Real> ? 0 : std::exp(logits[j] - largest);  // NaN stays NaN: it is not an empty row
    sum += p[j];
  }
  if (sum == 0) return -kInfinity<Real>;
  for (Real& weight : p) weight /= sum;
  return largest + std::log(sum);
}

/// O and LSE of one head of one sequence.
template <class Real>
void forward_head(const Head<Real>& head, Rounding rounding, bool magnitude_is_result, ForwardResult& result) {
  const Call& call = head.call;
  const ForwardViews out(result);
  double largest_logit = std::isfinite(head.sink) ? std::abs(static_cast<double>(head.sink)) : 0;
  LogitRow<Real> row(head.sequence.sk);
  std::vector<Real> p(row.logit.size());
  std::vector<Real> o(static_cast<std::size_t>(call.dv)), magnitude(o.size());

  for (Index i = 0; i < head.sequence.sq; ++i) {
    head.logits(i, row);
    largest_logit = larger_logit(row, largest_logit);
    const Real lse = softmax(row.logit, head.sink, p);
    result.lse.value[static_cast<std::size_t>(lse_element(call, head.sequence, head.head, i))] =
        static_cast<double>(lse);

    std::fill(o.begin(), o.end(), Real{0});
    std::fill(magnitude.begin(), magnitude.end(), Real{0});
    for (Index j = 0; j < head.sequence.sk; ++j) {
      const std::size_t at = static_cast<std::size_t>(j);
      if (row.logit[at] == -kInfinity<Real>) continue;
      const Real weight = rounding(rounding(p[at]) * static_cast<Real>(head.keep_factor(i, j)));
      for (std::size_t c = 0; c < o.size(); ++c) {
        o[c] += weight * head.v[j][c];
        magnitude[c] += weight * std::abs(head.v[j][c]);
      }
    }
    for (Index c = 0; c < call.dv; ++c) {
      const std::size_t at = static_cast<std::size_t>(c);
      const Real rounded = rounding(o[at]);
      const Place place = call.query_place(head.sequence, i);
      set(out.o, place, head.head, c, static_cast<double>(rounded));
      set(out.o_magnitude, place, head.head, c,
          static_cast<double>(magnitude_is_result ? std::abs(rounded) : magnitude[at]));
    }
  }
  for (Index i = 0; i < head.sequence.sq; ++i) {
    result.lse.logit[static_cast<std::size_t>(lse_element(call, head.sequence, head.head, i))] = largest_logit;
    for (Index c = 0; c < call.dv; ++c)
      set(out.o_logit, call.query_place(head.sequence, i), head.head, c, largest_logit);
  }
}

}  // namespace

// Rows in no sequence, and rows beyond the used ones, keep what the results start with: O 0 and LSE -inf, also with a sink.
template <class Real> ForwardResult run_forward(const Inputs& in, const Options& options, Rounding rounding) {
  const Call call(in.q, in.k, in.v, options);
  ForwardResult result{make_result(call.o_shape(), 0), make_result(call.lse_shape(), -kInfinity<double>)};
  const bool magnitude_is_result = in.q.dtype == DType::fp16 || in.q.dtype == DType::bf16;
  split(call.b * call.h, options.threads, [&](Index task) {
    const Head<Real> head(call, call.sequence(task / call.h), task % call.h, rounding);
    forward_head(head, rounding, magnitude_is_result, result);
  });
  return result;
}

template ForwardResult run_forward<double>(const Inputs&, const Options&, Rounding);
template ForwardResult run_forward<float>(const Inputs&, const Options&, Rounding);

ForwardResult exact_forward(const Inputs& in, const Options& options) { return run_forward<double>(in, options, {}); }

ForwardResult plain_forward(const Inputs& in, const Options& options) {
  if (in.q.dtype == DType::fp64) return run_forward<double>(in, options, {});
  return run_forward<float>(in, options, {in.q.dtype});
}

void store_result(const Result& result, const Tensor& tensor) {
  if (!tensor.given()) return;
  const View out(tensor);
  Dims at = first_of(result.shape);
  for (const double value : result.value) {
    out.set_element(at, value);
    advance(at, result.shape);
  }
}

namespace {

void append(const Call& call) {
  for (Index b = 0; b < call.b; ++b) {
    const Sequence s = call.sequence(b);
    for (Index j = s.sk - s.new_keys; j < s.sk; ++j) {
      for (Index head = 0; head < call.hk; ++head) {
        const std::vector<double> key = call.key_row(s, head, j), value = call.value_row(s, head, j);
        for (Index c = 0; c < call.d; ++c) set(call.k, call.key_place(s, j), head, c, key[static_cast<std::size_t>(c)]);
        for (Index c = 0; c < call.dv; ++c)
          set(call.v, call.key_place(s, j), head, c, value[static_cast<std::size_t>(c)]);
      }
    }
  }
}

}  // namespace

void forward(const Inputs& in, const Outputs& out, const Options& options) {
  const ForwardResult result = exact_forward(in, options);
  store_result(result.o, out.o);
  store_result(result.lse, out.lse);
  if (options.k_new.given()) append(Call(in.q, in.k, in.v, options));
}

}  // namespace narrows::reference
