#include "cpu/merge.hpp"

#include "cpu/pool.hpp"
#include "cpu/row_logits.hpp"
#include "shared/merge.h"

#include <algorithm>
#include <vector>

namespace narrows::cpu {
namespace {

constexpr i64 kRowsOfTask = 256;

/// One thread's work on rows (b, i, h), one at a time.
template <class T> class RowMerger {
 public:
  explicit RowMerger(const MergeCall& call)
      : call_(call),
        kernels_(*available_tile_kernels<T>().front()),
        lse_(call.parts.size()),
        weights_(call.parts.size()),
        o_(static_cast<std::size_t>(call.value_dim)),
        part_(o_),
        dout_(o_),
        weighted_(o_) {}

  /// O and LSE of the row from its parts.
  void load(i64 b, i64 i, i64 h) {
    b_ = b;
    i_ = i;
    h_ = h;
    for (std::size_t part = 0; part < lse_.size(); ++part) lse_[part] = number(call_.parts[part].lse, b, h, i);
    sink_ = call_.sinks ? number(call_.sinks, h) : -kInfinity<double>;
    merge_ = merge_of<ScalarMath>(lse_.data(), static_cast<i64>(lse_.size()), 1, sink_);
    std::fill(o_.begin(), o_.end(), T{0});
    for (std::size_t part = 0; part < lse_.size(); ++part) {
      weights_[part] = static_cast<T>(part_weight<ScalarMath>(merge_, lse_[part]));
      if (lse_[part] == -kInfinity<double>) continue;  // empty: its O may never have been written
      row(call_.parts[part].o, part_);
      for (std::size_t x = 0; x < o_.size(); ++x) o_[x] += weights_[part] * part_[x];
    }
  }

  void store_result() const {
    if (call_.out.o) store(o_, T{1}, call_.out.o);
    if (call_.out.lse) store(static_cast<T>(merged_lse<ScalarMath>(merge_)), call_.out.lse, b_, h_, i_);
  }

  /// dO_p = w_p dO and dLSE_p = w_p (dO . (O_p - O) + dLSE): zero where the part has no weight, whatever it holds.
  void store_gradients() {
    const double shared = load_gradients();
    for (std::size_t part = 0; part < call_.gradients.size(); ++part) {
      const PartViews& target = call_.gradients[part];
      const T weight = weights_[part];
      if (target.o) {
        for (std::size_t x = 0; x < o_.size(); ++x) weighted_[x] = contribution(weight, dout_[x]);
        store(weighted_, T{1}, target.o);
      }
      if (!target.lse) continue;
      double gradient = 0;
      if (weight != T{0}) {
        row(call_.parts[part].o, part_);
        gradient = double{weight} * (dot(part_) + shared);
      }
      store(static_cast<T>(gradient), target.lse, b_, h_, i_);
    }
  }

  /// The sink is a part whose O is 0.
  double sink_gradient() { return contribution(part_weight<ScalarMath>(merge_, sink_), load_gradients()); }

  void store_sink_gradient(i64 h, double value) const { store(static_cast<T>(value), call_.dsinks, h); }

 private:
  double number(const View& view, i64 a, i64 b = 0, i64 c = 0) const {
    T value = 0;
    kernels_.convert(view.at(a, b, c), 0, view.dtype, 1, &value);
    return double{value};
  }
  void row(const View& view, std::vector<T>& out) const {
    kernels_.convert(view.at(b_, i_, h_), view.strides[3], view.dtype, call_.value_dim, out.data());
  }
  void store(const std::vector<T>& values, T factor, const View& view) const {
    kernels_.store(values.data(), factor, call_.value_dim, view.at(b_, i_, h_), view.strides[3], view.dtype);
  }
  void store(T value, const View& view, i64 a, i64 b = 0, i64 c = 0) const {
    kernels_.store(&value, T{1}, 1, view.at(a, b, c), 0, view.dtype);
  }
  double dot(const std::vector<T>& values) const {
    double sum = 0;
    for (std::size_t x = 0; x < values.size(); ++x) sum += double{dout_[x]} * double{values[x]};
    return sum;
  }
  /// Loads dO; returns dLSE - dO . O.
  double load_gradients() {
    row(call_.dout, dout_);
    return (call_.dlse ? number(call_.dlse, b_, h_, i_) : 0.0) - dot(o_);
  }

  const MergeCall& call_;
  const TileKernels<T>& kernels_;
  i64 b_ = 0, i_ = 0, h_ = 0;
  Merge<double> merge_;
  double sink_ = 0;
  std::vector<double> lse_;
  std::vector<T> weights_, o_, part_, dout_, weighted_;
};

/// Calls visit(merger) for every row, loaded.
template <class T, class Visit> void for_each_row(const MergeCall& call, int threads, Visit visit) {
  const i64 rows = call.batch * call.rows * call.heads;
  parallel_for(ceil_div(rows, kRowsOfTask), threads, [&](i64 task, int) {
    RowMerger<T> merger(call);
    const i64 end = std::min(rows, (task + 1) * kRowsOfTask);
    for (i64 number = task * kRowsOfTask; number < end; ++number) {
      const i64 row = number / call.heads;
      merger.load(row / call.rows, row % call.rows, number % call.heads);
      visit(merger);
    }
  });
}

/// A head's sum is one thread's, in ascending order of rows.
template <class T> void sum_sinks(const MergeCall& call, int threads) {
  parallel_for(call.heads, threads, [&](i64 h, int) {
    RowMerger<T> merger(call);
    double sum = 0;
    for (i64 b = 0; b < call.batch; ++b)
      for (i64 i = 0; i < call.rows; ++i) {
        merger.load(b, i, h);
        sum += merger.sink_gradient();
      }
    merger.store_sink_gradient(h, sum);
  });
}

template <class T> void backward(const MergeCall& call, int threads) {
  if (!call.gradients.empty()) for_each_row<T>(call, threads, [](RowMerger<T>& merger) { merger.store_gradients(); });
  if (call.dsinks) sum_sinks<T>(call, threads);
}

}  // namespace

void run_merge(const MergeCall& call, int threads) {
  if (call.dtype == DType::fp64)
    for_each_row<double>(call, threads, [](const RowMerger<double>& merger) { merger.store_result(); });
  else
    for_each_row<float>(call, threads, [](const RowMerger<float>& merger) { merger.store_result(); });
}

void run_merge_backward(const MergeCall& call, int threads) {
  call.dtype == DType::fp64 ? backward<double>(call, threads) : backward<float>(call, threads);
}

}  // namespace narrows::cpu
