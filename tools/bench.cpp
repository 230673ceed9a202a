// narrows bench: the table of measurements, in the row format that every measurement of this project has.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.hpp"
#include "cpu/machine.hpp"
#include "cpu/peak.hpp"
#include "cpu/reference_numbers.hpp"
#include "tools/commands.hpp"
#include "tools/files/failure.hpp"
#include "tools/files/layout.hpp"
#include "tools/progress.hpp"
#include "tools/text.hpp"

namespace narrows::cli {
namespace {

using Json = nlohmann::ordered_json;

/// The axes of the table; a filter replaces one.
struct Bench {
  std::vector<std::string> op{"forward"};
  std::vector<DType> dtype{DType::fp32, DType::bf16, DType::fp16};
  std::vector<std::int64_t> d{64, 128};
  std::vector<std::int64_t> sq{512, 1024, 2048, 4096};
  std::vector<bool> causal{false, true};
  std::vector<std::int64_t> threads;  // empty: 1 and all
  std::optional<std::int64_t> b, h, hk, sk, dv;
  bool json = false;
  ProgressMode progress;
};

struct Row {
  DType dtype;
  std::int64_t b, h, hk, sq, sk, d, dv;
  bool causal;
  int threads;
  double milliseconds = 0, tflops = 0, peak = 0;  // tflops and peak in the same unit
  double fraction() const { return tflops / peak; }
};

constexpr double kMostFraction = 1.02;

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

/// By the formula that every peer is counted by: causal is half of all pairs.
double flops(const Row& row) {
  const double pairs = static_cast<double>(row.b * row.h) * static_cast<double>(row.sq) * static_cast<double>(row.sk);
  return 2.0 * static_cast<double>(row.d + row.dv) * pairs * (row.causal ? 0.5 : 1.0);
}

/// Median of at least 3 runs after one to warm up, until 0.3 s are spent.
double measured_seconds(const Row& row) {
  constexpr double kBudget = 0.3;
  constexpr std::size_t kLeast = 3, kMost = 50;
  const Operand q(row.dtype, {row.b, row.sq, row.h, row.d}, 1), k(row.dtype, {row.b, row.sk, row.hk, row.d}, 2),
      v(row.dtype, {row.b, row.sk, row.hk, row.dv}, 3), o(row.dtype, {row.b, row.sq, row.h, row.dv}, 4);
  Options options;
  options.causal = row.causal ? Causal::bottom_right : Causal::none;
  options.threads = row.threads;
  const auto once = [&] {
    const auto begin = std::chrono::steady_clock::now();
    forward({q.tensor(), k.tensor(), v.tensor()}, {o.tensor(), {}}, options);
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

/// The best multiply-add rate seen so far in this run, for each number of threads, in TFLOP/s.
class Peaks {
 public:
  double measure(int threads) {
    double& best = best_[threads];
    best = std::max(best, cpu::fma_rate(cpu::machine().instruction_set, threads) * 1e-12);
    return best;
  }

 private:
  std::map<int, double> best_;
};

void measure(Row& row, Peaks& peaks) {
  constexpr int kMeasuredAgain = 5;
  const double seconds = measured_seconds(row);
  row.milliseconds = seconds * 1e3;
  row.tflops = flops(row) / seconds * 1e-12;
  row.peak = peaks.measure(row.threads);
  // The loop may have met other processes that the row did not.
  for (int again = 0; row.fraction() > kMostFraction && again < kMeasuredAgain; ++again)
    row.peak = peaks.measure(row.threads);
}

std::string as_json(const Row& row) {
  const Json object{{"op", "forward"},
                    {"backend", "cpu"},
                    {"family", "cpu"},
                    {"dtype", name(row.dtype)},
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
                    {"tflops", row.tflops},
                    {"peak", row.peak},
                    {"fraction", row.fraction()},
                    {"peers", Json::object()},
                    {"against", nullptr},
                    {"ratio", nullptr}};
  return object.dump();
}

constexpr const char* kColumns =
    "{:<8} {:<6} {:<5} {:>3} {:>4} {:>4} {:>6} {:>6} {:>4} {:>4} {:<6} {:>7} {:>9} {:>8} {:>7} {:>8}\n";

std::string heading() {
  return fmt::format(kColumns, "op", "family", "dtype", "b", "h", "hk", "sq", "sk", "d", "dv", "causal", "threads",
                     "ms", "TFLOP/s", "peak", "fraction");
}

std::string as_text(const Row& row) {
  return fmt::format(kColumns, "forward", "cpu", name(row.dtype), row.b, row.h, row.hk, row.sq, row.sk, row.d, row.dv,
                     row.causal ? "true" : "false", row.threads, fmt::format("{:.3f}", row.milliseconds),
                     fmt::format("{:.4f}", row.tflops), fmt::format("{:.4f}", row.peak),
                     fmt::format("{:.3f}", row.fraction()));
}

/// Queries times heads stay the same along the table, so that rows take similar times.
std::int64_t heads_for(std::int64_t sq) {
  constexpr std::int64_t kQueryHeads = 16384;
  return std::clamp<std::int64_t>(kQueryHeads / std::max<std::int64_t>(sq, 1), 1, 32);
}

std::vector<Row> rows_of(const Bench& bench) {
  std::vector<std::int64_t> threads = bench.threads;
  if (threads.empty()) {
    threads = {1};
    if (cpu::machine().threads > 1) threads.push_back(cpu::machine().threads);
  }
  std::vector<Row> rows;
  for (const std::int64_t count : threads)
    for (const DType dtype : bench.dtype)
      for (const std::int64_t d : bench.d)
        for (const bool causal : bench.causal)
          for (const std::int64_t sq : bench.sq) {
            const std::int64_t h = bench.h.value_or(heads_for(sq));
            rows.push_back({dtype, bench.b.value_or(1), h, bench.hk.value_or(h), sq, bench.sk.value_or(sq), d,
                            bench.dv.value_or(d), causal, static_cast<int>(count)});
          }
  return rows;
}

int run(const Bench& bench) {
  for (const std::string& op : bench.op)
    if (op != "forward") throw Error(ErrorCode::not_implemented, fmt::format("--op: {}: comes in a later version", op));
  const std::vector<Row> rows = rows_of(bench);
  Peaks peaks;
  std::vector<std::string> impossible;
  if (!bench.json) fmt::print("{}", heading());
  for (Row row : rows) {
    const Progress progress(bench.progress, fmt::format("bench: sq {} d {} {}", row.sq, row.d, name(row.dtype)));
    measure(row, peaks);
    fmt::print("{}", bench.json ? as_json(row) + "\n" : as_text(row));
    std::fflush(stdout);
    if (row.fraction() > kMostFraction)
      impossible.push_back(fmt::format("{} sq={} d={} threads={}: {:.3f} of the peak", name(row.dtype), row.sq, row.d,
                                       row.threads, row.fraction()));
  }
  if (!impossible.empty())
    fmt::print(stderr, "narrows: bench: faster than the machine, above {} of the measured peak: {}\n", kMostFraction,
               joined(impossible, "; "));
  return impossible.empty() ? kOk : kCheckFailed;
}

/// A filter of one axis: values separated by commas, each read by `parse`.
template <class Value, class Parse>
void add_axis(CLI::App& command, const char* name, std::vector<Value>& axis, const char* help, Parse parse) {
  add_option(command, name, {"LIST", help}, [&axis, parse](const std::string& option, const std::string& text) {
    axis.clear();
    for (const std::string_view part : split(text)) axis.push_back(parse(option, part));
  });
}

constexpr std::int64_t kMostSize = 1 << 20;
std::int64_t parse_size(const std::string& option, std::string_view text) {
  return parse_integer(option, text, 1, kMostSize);
}

std::string parse_op(const std::string& option, std::string_view text) {
  if (text != "forward" && text != "backward" && text != "decode")
    refuse_value(option, files::printable(text), "must be forward, backward or decode", "forward");
  return std::string(text);
}

DType parse_row_dtype(const std::string& option, std::string_view text) {
  const DType dtype = parse_dtype(option, text);
  if (dtype == DType::fp64) refuse_value(option, text, "the peak is of fp32; must be fp32, bf16 or fp16", "fp32");
  return dtype;
}

bool parse_row_causal(const std::string& option, std::string_view text) {
  if (text != "true" && text != "false" && text != "bottom_right" && text != "none")
    refuse_value(option, files::printable(text), "must be true or false");
  return text == "true" || text == "bottom_right";
}

void add_options(CLI::App& command, Bench& bench) {
  add_axis(command, "--op", bench.op, "forward (backward and decode come later)", parse_op);
  add_axis(command, "--dtype", bench.dtype, "fp32, bf16, fp16; default all", parse_row_dtype);
  add_axis(command, "--d", bench.d, "Head dims; default 64,128", parse_size);
  add_axis(command, "--sq", bench.sq, "Query sequence lengths; default 512,1024,2048,4096", parse_size);
  add_axis(command, "--causal", bench.causal, "true, false; default both", parse_row_causal);
  add_axis(command, "--threads", bench.threads, "Default 1 and every core",
           [](const std::string& option, std::string_view text) { return parse_integer(option, text, 1, 1024); });
  const auto size = [&](const char* name, std::optional<std::int64_t> Bench::*member, const char* help) {
    add_option(command, name, {"N", help}, [&bench, member](const std::string& option, const std::string& text) {
      bench.*member = parse_size(option, text);
    });
  };
  size("--b", &Bench::b, "Batch; default 1");
  size("--h", &Bench::h, "Query heads; default 16384 / sq, at most 32");
  size("--hk", &Bench::hk, "Kv heads; default h");
  size("--sk", &Bench::sk, "Key sequence length; default sq");
  size("--dv", &Bench::dv, "Head dim of v; default d");
}

constexpr const char* kHelp =
    "Without options the whole table. An option replaces the values of its axis, inside the table or not.\n"
    "ms is the median; peak is a loop of multiply-adds measured beside each row, in TFLOP/s; causal counts half the\n"
    "pairs. A fraction of the peak above 1.02 cannot be and ends in exit code 1.\n\n"
    "  narrows bench\n"
    "  narrows bench --dtype bf16 --sq 1024,4096 --causal true --json";

}  // namespace

Command add_bench(CLI::App& app) {
  CLI::App& command = add_command(app, "bench", "Measure the table of benchmarks, or rows of one's own", kHelp);
  const auto bench = std::make_shared<Bench>();
  add_options(command, *bench);
  add_flag(command, "--json", bench->json, {"", "One row a line on stdout, nothing else there"});
  add_flag(command, "--progress", bench->progress.asked,
           {"", "Say on stderr what takes long, also where that is no terminal"});
  return [bench] { return run(*bench); };
}

}  // namespace narrows::cli
