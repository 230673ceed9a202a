#include "cpu/criterion.hpp"

#include "cpu/reference_numbers.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

namespace narrows {
namespace {

using reference::Index;

constexpr double kInfinite = std::numeric_limits<double>::infinity();

/// u of the criterion.
double unit(DType dtype, double largest_logit) {
  switch (dtype) {
    case DType::bf16: return std::ldexp(1, -8);
    case DType::fp16: return std::ldexp(1, -11);
    case DType::fp32: return std::ldexp(1 + largest_logit, -21);
    default: return std::ldexp(1 + largest_logit, -48);
  }
}

/// What an element may err by beside twice the plain error of its row.
double allowance(std::string_view name, const reference::Result& exact, std::size_t element, DType compute,
                 DType stored) {
  const double logit = exact.logit[element];
  if (name == "lse") return (compute == DType::fp64 ? 1e-13 : 2e-5) * (1 + logit / 8);
  return std::max(unit(compute, logit), unit(stored, 0)) * exact.magnitude[element];
}

double distance(double a, double b) { return a == b ? 0 : std::abs(a - b); }  // two equal infinities agree

/// |ours - exact| / limit. Not a number must answer not a number, and an infinity the same infinity.
double ratio(double ours, double exact, double limit) {
  if (std::isnan(exact)) return std::isnan(ours) ? 0 : kInfinite;
  const double error = distance(ours, exact);
  if (error == 0) return 0;
  return std::isnan(error) ? kInfinite : error / limit;
}

/// Sums for a relative Frobenius error.
struct Frobenius {
  double error = 0, norm = 0;
  void add(double value, double exact) {
    if (!std::isfinite(value) || !std::isfinite(exact)) return;
    error += (value - exact) * (value - exact);
    norm += exact * exact;
  }
  double relative() const { return error == 0 ? 0 : std::sqrt(error / norm); }
};

/// The largest finite |plain - exact| of elements [first, last).
double plain_error(const reference::Result& exact, const reference::Result& plain, std::size_t first,
                   std::size_t last) {
  double largest = 0;
  for (std::size_t element = first; element < last; ++element) {
    const double error = distance(plain.value[element], exact.value[element]);
    if (std::isfinite(error)) largest = std::max(largest, error);
  }
  return largest;
}

std::string number(double value) {
  char digits[40];
  std::snprintf(digits, sizeof digits, "%.9g", value);
  return digits;
}

/// o[1, 0, 3, 7] for an element of a result.
std::string element_text(const std::string& name, const Dims& where) {
  std::string joined = name + "[";
  for (std::size_t axis = 0; axis < where.rank(); ++axis) joined += (axis ? ", " : "") + std::to_string(where[axis]);
  return joined + "]";
}

}  // namespace

std::string Verdict::text() const {
  return name + (passed ? " passes: " : " fails: ") + "worst " + element_text(name, where) + " = " + number(ours) +
         ", exact " + number(exact) + ", limit " + number(limit) + " (" + number(worst) + " of it); relative error " +
         number(error) + ", plain " + number(plain_error);
}

Verdict judge(std::string_view name, const Tensor& ours, const reference::Result& exact, const reference::Result& plain,
              DType compute) {
  Verdict verdict;
  verdict.name = name;
  verdict.where = reference::first_of(exact.shape);
  const bool by_row = name != "lse" && name != "dslopes" && name != "dsinks";
  const reference::View view(ours);
  const std::size_t columns = static_cast<std::size_t>(exact.shape[exact.shape.rank() - 1]);
  Frobenius error, plain_frobenius;
  double row_error = 0;
  Dims at = verdict.where;
  for (std::size_t element = 0; element < exact.value.size(); ++element, reference::advance(at, exact.shape)) {
    if (by_row && element % columns == 0) row_error = plain_error(exact, plain, element, element + columns);
    const double value = view.element(at);
    const double limit = 2 * row_error + allowance(name, exact, element, compute, ours.dtype);
    const double part = ratio(value, exact.value[element], limit);
    error.add(value, exact.value[element]);
    plain_frobenius.add(plain.value[element], exact.value[element]);
    if (part <= verdict.worst && element != 0) continue;
    verdict.worst = part;
    verdict.where = at;
    verdict.ours = value;
    verdict.exact = exact.value[element];
    verdict.limit = limit;
  }
  verdict.passed = verdict.worst <= 1;
  verdict.error = error.relative();
  verdict.plain_error = plain_frobenius.relative();
  return verdict;
}

std::vector<Verdict> check_forward(const Inputs& in, const Outputs& ours, const Options& options) {
  const reference::ForwardResult exact = reference::exact_forward(in, options);
  const reference::ForwardResult plain = reference::plain_forward(in, options);
  std::vector<Verdict> verdicts{judge("o", ours.o, exact.o, plain.o, in.q.dtype)};
  if (ours.lse.given()) verdicts.push_back(judge("lse", ours.lse, exact.lse, plain.lse, in.q.dtype));
  return verdicts;
}

std::vector<Verdict> check_backward(const BackwardInputs& in, const Gradients& ours, const Options& options) {
  BackwardInputs bare = in;
  bare.o = bare.lse = Tensor{};
  const reference::BackwardResult exact = reference::exact_backward(bare, options);
  const reference::BackwardResult plain = reference::plain_backward(bare, options);
  std::vector<Verdict> verdicts;
  const auto judge_given = [&](std::string_view name, const Tensor& tensor,
                               reference::Result reference::BackwardResult::*result) {
    if (tensor.given()) verdicts.push_back(judge(name, tensor, exact.*result, plain.*result, in.q.dtype));
  };
  judge_given("dq", ours.dq, &reference::BackwardResult::dq);
  judge_given("dk", ours.dk, &reference::BackwardResult::dk);
  judge_given("dv", ours.dv, &reference::BackwardResult::dv);
  judge_given("dbias", ours.dbias, &reference::BackwardResult::dbias);
  judge_given("dslopes", ours.dslopes, &reference::BackwardResult::dslopes);
  judge_given("dsinks", ours.dsinks, &reference::BackwardResult::dsinks);
  return verdicts;
}

}  // namespace narrows
