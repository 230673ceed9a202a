// One query head of one sequence: its rows as matrices and its logits.
//
// Real and Rounding are how one text serves two computations. Exact: Real = double, nothing rounded. Plain: Real = float,
// what a three-kernel implementation writes to memory is rounded to q's type.
#pragma once

#include "cpu/reference_sequences.hpp"

#include <cmath>
#include <limits>
#include <optional>

namespace narrows::reference {

struct Rounding {
  std::optional<DType> stored;  // none: exact

  template <class Real> Real operator()(Real value) const {
    return stored ? static_cast<Real>(round_to(*stored, static_cast<double>(value))) : value;
  }
};

template <class Real> inline constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

template <class Real> Real dot(const Real* a, const Real* b, Index size) {
  Real sum = 0;
  for (Index c = 0; c < size; ++c) sum += a[c] * b[c];
  return sum;
}

/// Logits of one query, by key. A key that it does not see has logit -inf, and so has one whose bias is -inf.
template <class Real> struct LogitRow {
  std::vector<Real> logit;
  std::vector<Real> slope;  // d logit / d (scale q.k): 1 unless there is a softcap

  explicit LogitRow(Index keys) : logit(static_cast<std::size_t>(keys)), slope(static_cast<std::size_t>(keys)) {}
};

template <class Real> class Head {
 public:
  Head(const Call& call_, const Sequence& sequence_, Index head_, Rounding rounding);

  void logits(Index query, LogitRow<Real>& row) const;
  double distance(Index query, Index key) const { return std::abs(static_cast<double>(query + sequence.shift - key)); }
  double keep_factor(Index query, Index key) const { return call.dropout.factor(sequence.b, head, query, key); }

  const Call& call;
  Sequence sequence;
  Index head, kv_head;
  Matrix<Real> q, k, v;  // rows of keys that no query of this head sees are never read and stay 0
  Real sink;             // -inf = none

 private:
  std::vector<bool> seen_keys() const;
  Real logit(Index query, Index key, Real& slope) const;

  Rounding rounding_;
};

template <class Real> void copy(const std::vector<double>& from, Real* to, Rounding rounding) {
  for (const double value : from) *to++ = rounding(static_cast<Real>(value));
}

template <class Real>
Head<Real>::Head(const Call& call_, const Sequence& sequence_, Index head_, Rounding rounding)
    : call(call_),
      sequence(sequence_),
      head(head_),
      kv_head(head_ / call_.group()),
      q(sequence_.sq, call_.d),
      k(sequence_.sk, call_.d),
      v(sequence_.sk, call_.dv),
      sink(call_.sinks.given() ? static_cast<Real>(call_.sinks.at(head_)) : -kInfinity<Real>),
      rounding_(rounding) {
  for (Index i = 0; i < sequence.sq; ++i) copy(call.query_row(sequence, head, i), q[i], rounding);
  const std::vector<bool> seen = seen_keys();
  for (Index j = 0; j < sequence.sk; ++j) {
    if (!seen[static_cast<std::size_t>(j)]) continue;
    copy(call.key_row(sequence, kv_head, j), k[j], rounding);
    copy(call.value_row(sequence, kv_head, j), v[j], rounding);
  }
}

template <class Real> std::vector<bool> Head<Real>::seen_keys() const {
  std::vector<bool> seen(static_cast<std::size_t>(sequence.sk), false);
  for (Index i = 0; i < sequence.sq; ++i)
    for (Index j = 0; j < sequence.sk; ++j)
      if (!seen[static_cast<std::size_t>(j)] && call.visible(sequence, head, i, j))
        seen[static_cast<std::size_t>(j)] = true;
  return seen;
}

template <class Real> void Head<Real>::logits(Index query, LogitRow<Real>& row) const {
  for (Index j = 0; j < sequence.sk; ++j) {
    const std::size_t at = static_cast<std::size_t>(j);
    row.logit[at] = call.visible(sequence, head, query, j) ? logit(query, j, row.slope[at]) : -kInfinity<Real>;
  }
}

template <class Real> Real Head<Real>::logit(Index query, Index key, Real& slope) const {
  const Options& options = call.options;
  Real x = rounding_(static_cast<Real>(call.scale) * dot(q[query], k[key], call.d));
  slope = 1;
  if (options.softcap > 0) {
    const Real cap = static_cast<Real>(options.softcap);
    const Real bent = std::tanh(x / cap);
    x = cap * bent;
    slope = 1 - bent * bent;
  }
  if (call.slopes.given()) x -= static_cast<Real>(call.slope(sequence.b, head) * distance(query, key));
  if (call.bias.given()) {
    const Real bias = static_cast<Real>(call.bias.at(sequence.b, head, query, key));
    x = bias == -kInfinity<Real> ? bias : x + bias;  // masks even where x is NaN
  }
  return x;
}

/// The largest finite |logit| of a row, or `largest` if that is larger.
template <class Real> double larger_logit(const LogitRow<Real>& row, double largest) {
  for (const Real logit : row.logit) {
    const double size = std::abs(static_cast<double>(logit));
    if (std::isfinite(size) && size > largest) largest = size;
  }
  return largest;
}

}  // namespace narrows::reference
