#include "tools/bench_row.hpp"

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/types.hpp"
#include "cpu/machine.hpp"
#include "cpu/peak.hpp"
#include "cpu/reference_numbers.hpp"
#include "tools/files/layout.hpp"

namespace narrows::cli {
namespace {

using Json = nlohmann::ordered_json;

/// A tensor of normal-looking numbers, the same in every run.
class Operand {
 public:
  Operand(DType dtype, const Dims& shape, std::uint64_t seed)
      : memory_(files::allocate("bench", static_cast<std::size_t>(files::dense_bytes("bench", shape, dtype)))),
        tensor_{memory_.bytes.data(), dtype, shape, {}, Device{}} {
    const std::size_t count = memory_.bytes.size() / item_size(dtype);
    constexpr std::size_t kPeriod = 65521;  // prime: rows differ, and rounding to 16 bits is paid for once
    std::vector<double> values(std::min(count, kPeriod));
    for (double& value : values) {
      double sum = -6;
      for (int draw = 0; draw < 12; ++draw) sum += next(seed);
      value = sum;
    }
    for (std::size_t n = 0; n < count; ++n)
      reference::store(tensor_.data, dtype, static_cast<reference::Index>(n), values[n % kPeriod]);
  }
  const Tensor& tensor() const { return tensor_; }

 private:
  static double next(std::uint64_t& state) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    return static_cast<double>(state >> 11) * 0x1p-53;
  }

  files::Memory memory_;
  Tensor tensor_;
};

/// By the formulas that every peer is counted by: causal is half of all pairs.
double flops(const Row& row) {
  const double pairs = static_cast<double>(row.b * row.h) * static_cast<double>(row.sq) * static_cast<double>(row.sk);
  const double per_pair =
      row.op == Op::backward ? static_cast<double>(3 * row.d + 2 * row.dv) : static_cast<double>(row.d + row.dv);
  return 2 * per_pair * pairs * (row.causal ? 0.5 : 1.0);
}

/// Of q, k, v and o; k and v once for each kv head.
std::int64_t bytes(const Row& row) {
  const std::int64_t rows = row.b * (row.hk * row.sk + row.h * row.sq);
  return rows * (row.d + row.dv) * static_cast<std::int64_t>(item_size(row.dtype));
}

double median_seconds(const std::function<void()>& call) {
  constexpr double kBudget = 0.3;
  constexpr std::size_t kLeast = 3, kMost = 50;
  const auto once = [&] {
    const auto begin = std::chrono::steady_clock::now();
    call();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  once();
  std::vector<double> seconds;
  double spent = 0;
  while (seconds.size() < kLeast || (spent < kBudget && seconds.size() < kMost)) {
    seconds.push_back(once());
    spent += seconds.back();
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

double measured_seconds(const Row& row) {
  const Operand q(row.dtype, {row.b, row.sq, row.h, row.d}, 1), k(row.dtype, {row.b, row.sk, row.hk, row.d}, 2),
      v(row.dtype, {row.b, row.sk, row.hk, row.dv}, 3), o(row.dtype, {row.b, row.sq, row.h, row.dv}, 4);
  const Inputs in{q.tensor(), k.tensor(), v.tensor()};
  Options options;
  options.causal = row.causal ? Causal::bottom_right : Causal::none;
  options.threads = row.threads;
  if (row.op == Op::forward) return median_seconds([&] { forward(in, {o.tensor(), {}}, options); });
  if (row.op == Op::decode) {
    std::vector<std::int32_t> filled(static_cast<std::size_t>(row.b), static_cast<std::int32_t>(row.sk));
    options.cache_seqlens = view(filled.data(), {row.b});
    return median_seconds([&] { forward(in, {o.tensor(), {}}, options); });
  }
  const Operand dout(row.dtype, o.tensor().shape, 5), lse(DType::fp32, {row.b, row.h, row.sq}, 6);
  const Operand dq(row.dtype, q.tensor().shape, 7), dk(row.dtype, k.tensor().shape, 8),
      dv(row.dtype, v.tensor().shape, 9);
  forward(in, {o.tensor(), lse.tensor()}, options);
  const BackwardInputs saved{q.tensor(), k.tensor(), v.tensor(), o.tensor(), lse.tensor(), dout.tensor(), {}};
  Gradients out;
  out.dq = dq.tensor();
  out.dk = dk.tensor();
  out.dv = dv.tensor();
  return median_seconds([&] { backward(saved, out, options); });
}

constexpr const char* kColumns =
    "{:<8} {:<6} {:<5} {:>3} {:>4} {:>4} {:>6} {:>6} {:>4} {:>4} {:<6} {:>7} {:>9} {:>8} {:>7} {:>8}\n";

}  // namespace

std::string_view name(Op op) {
  switch (op) {
    case Op::forward: return "forward";
    case Op::backward: return "backward";
    case Op::decode: return "decode";
  }
  return "unknown";
}

double Peaks::measure(const Row& row) {
  const bool reads = row.op == Op::decode;
  double& best = best_[{row.threads, reads ? bytes(row) : 0}];
  best = std::max(best, reads ? cpu::read_rate(row.threads, static_cast<std::size_t>(bytes(row))) * 1e-9
                              : cpu::fma_rate(cpu::machine().instruction_sets.front(), row.threads) * 1e-12);
  return best;
}

void measure(Row& row, Peaks& peaks) {
  constexpr int kMeasuredAgain = 5;
  const double seconds = measured_seconds(row);
  row.milliseconds = seconds * 1e3;
  row.rate = row.op == Op::decode ? static_cast<double>(bytes(row)) / seconds * 1e-9 : flops(row) / seconds * 1e-12;
  row.peak = peaks.measure(row);
  // The loop may have met other processes that the row did not.
  for (int again = 0; row.impossible() && again < kMeasuredAgain; ++again) row.peak = peaks.measure(row);
}

std::string as_json(const Row& row) {
  const Json object{{"op", name(row.op)},
                    {"backend", "cpu"},
                    {"family", "cpu"},
                    {"dtype", narrows::name(row.dtype)},
                    {"b", row.b},
                    {"h", row.h},
                    {"hk", row.hk},
                    {"sq", row.sq},
                    {"sk", row.sk},
                    {"d", row.d},
                    {"dv", row.dv},
                    {"causal", row.causal},
                    {"case", ""},
                    {"threads", row.threads},
                    {"ms", row.milliseconds},
                    {row.op == Op::decode ? "gbps" : "tflops", row.rate},
                    {"peak", row.peak},
                    {"fraction", row.fraction()},
                    {"peers", Json::object()},
                    {"against", nullptr},
                    {"ratio", nullptr}};
  return object.dump();
}

std::string heading(Op op) {
  return fmt::format(kColumns, "op", "family", "dtype", "b", "h", "hk", "sq", "sk", "d", "dv", "causal", "threads",
                     "ms", op == Op::decode ? "GB/s" : "TFLOP/s", "peak", "fraction");
}

std::string as_text(const Row& row) {
  const int digits = row.op == Op::decode ? 2 : 4;
  return fmt::format(kColumns, name(row.op), "cpu", narrows::name(row.dtype), row.b, row.h, row.hk, row.sq, row.sk,
                     row.d, row.dv, row.causal ? "true" : "false", row.threads, fmt::format("{:.3f}", row.milliseconds),
                     fmt::format("{:.{}f}", row.rate, digits), fmt::format("{:.{}f}", row.peak, digits),
                     fmt::format("{:.3f}", row.fraction()));
}

}  // namespace narrows::cli
