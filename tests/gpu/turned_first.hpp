// A GPU rounds a query that its position has turned to q's type before it multiplies, as new keys are rounded when they are stored.
// In 16 bits that shows in the LSE, so exactness is asked of the call that this leaves.
#pragma once

#include "cpu/reference_sequences.hpp"
#include "tests/support/check.hpp"
#include "tests/support/tensors.hpp"

#include <cmath>

namespace narrows::test {

/// The same call with q and k_new turned beforehand.
class TurnedFirst {
 public:
  TurnedFirst(const Inputs& in_, const Options& options_) : in(in_), options(options_) {
    if (!options.rotary_cos.given() || in.q.dtype == DType::fp32) return;
    q_ = copy(in.q);
    if (options.k_new.given()) k_new_ = copy(options.k_new);
    const reference::Call call(in_.q, in_.k, in_.v, options_);
    for (std::int64_t b = 0; b < call.b; ++b) {
      const reference::Sequence s = call.sequence(b);
      for (std::int64_t i = 0; i < s.sq; ++i) turn(q_, call.query_place(s, i), s.rotary_query + i);
      for (std::int64_t t = 0; t < s.new_keys; ++t) turn(k_new_, call.new_place(s, t), s.first_new_slot + t);
    }
    in.q = q_;
    options.k_new = k_new_;
    options.rotary_cos = options.rotary_sin = options.rotary_base = {};
    options.rotary_interleaved = false;
  }
  TurnedFirst(const TurnedFirst&) = delete;
  TurnedFirst& operator=(const TurnedFirst&) = delete;

  Inputs in;
  Options options;

 private:
  static Array copy(const Tensor& tensor) {
    const reference::View view(tensor);
    return Array(tensor.dtype, tensor.shape).fill([&](const Dims& at) { return view.element(at); });
  }

  /// In the arithmetic of kernels/cache_rows.cuh, so that no element rounds to another.
  void turn(Array& rows, const reference::Place& place, std::int64_t position) {
    const reference::View cosines(options.rotary_cos), sines(options.rotary_sin), view(rows);
    const std::int64_t pairs = cosines.size(1);
    for (std::int64_t head = 0; head < view.size(view.rank() - 2); ++head)
      for (std::int64_t pair = 0; pair < pairs; ++pair) {
        const std::int64_t first = options.rotary_interleaved ? 2 * pair : pair;
        const std::int64_t second = options.rotary_interleaved ? first + 1 : first + pairs;
        const auto c = static_cast<float>(cosines.at(position, pair)), s = static_cast<float>(sines.at(position, pair));
        const auto x = static_cast<float>(reference::at(view, place, head, first));
        const auto y = static_cast<float>(reference::at(view, place, head, second));
        reference::set(view, place, head, first, double{std::fma(x, c, -(y * s))});
        reference::set(view, place, head, second, double{std::fma(x, s, y * c)});
      }
  }

  Array q_, k_new_;
};

/// Of cases with and without: what forward_agrees is asked.
inline testing::AssertionResult turned_agrees(const Inputs& in, const Outputs& ours, const Options& options) {
  const TurnedFirst turned(in, options);
  return forward_agrees(turned.in, ours, turned.options);
}

}  // namespace narrows::test
