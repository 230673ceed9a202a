// narrows bench: the table of measurements.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include "core/error.hpp"
#include "cpu/machine.hpp"
#include "tools/bench_row.hpp"
#include "tools/commands.hpp"
#include "tools/files/failure.hpp"
#include "tools/progress.hpp"
#include "tools/text.hpp"

namespace narrows::cli {
namespace {

/// The axes of the table; a filter replaces one. Where both are empty an operation has its own values.
struct Bench {
  std::vector<Op> op{Op::forward, Op::backward, Op::decode};
  std::vector<DType> dtype{DType::fp32, DType::bf16, DType::fp16};
  std::vector<std::int64_t> d, sq;
  std::vector<bool> causal;
  std::vector<std::int64_t> threads;  // empty: 1 and all
  std::optional<std::int64_t> b, h, hk, sk, dv;
  bool json = false;
  ProgressMode progress;
};

/// The table's own values of one operation.
struct Axes {
  std::vector<std::int64_t> d, sq, sk;  // sk empty: as sq
  std::vector<bool> causal;
};

Axes axes_of(Op op) {
  switch (op) {
    case Op::forward: return {{64, 128}, {512, 1024, 2048, 4096}, {}, {false, true}};
    case Op::backward: return {{64, 128}, {1024}, {}, {false, true}};
    case Op::decode: return {{128}, {1}, {4096, 16384}, {false}};
  }
  return {};
}

/// Queries times heads stay the same along the table, so that rows take similar times.
std::int64_t heads_for(std::int64_t sq) {
  constexpr std::int64_t kQueryHeads = 16384;
  return std::clamp<std::int64_t>(kQueryHeads / std::max<std::int64_t>(sq, 1), 1, 32);
}

std::vector<std::int64_t> thread_counts(const Bench& bench) {
  if (!bench.threads.empty()) return bench.threads;
  const std::int64_t all = cpu::machine().threads;
  return all > 1 ? std::vector<std::int64_t>{1, all} : std::vector<std::int64_t>{1};
}

/// A query head of prefill has its own kv head, four of decode share one.
Row row_of(const Bench& bench, Op op, DType dtype, std::int64_t sq, std::int64_t sk, std::int64_t d) {
  constexpr std::int64_t kDecodeHeads = 32, kDecodeGroup = 4;
  const bool decode = op == Op::decode;
  const std::int64_t h = bench.h.value_or(decode ? kDecodeHeads : heads_for(sq));
  const std::int64_t own_hk = decode && h % kDecodeGroup == 0 ? h / kDecodeGroup : h;
  return {op, dtype, bench.b.value_or(1), h, bench.hk.value_or(own_hk), sq, sk, d, bench.dv.value_or(d), false, 1};
}

void add_rows(std::vector<Row>& rows, const Bench& bench, Op op, int threads) {
  Axes axes = axes_of(op);
  if (!bench.d.empty()) axes.d = bench.d;
  if (!bench.sq.empty()) axes.sq = bench.sq;
  if (!bench.causal.empty()) axes.causal = bench.causal;
  if (bench.sk) axes.sk = {*bench.sk};
  for (const DType dtype : bench.dtype)
    for (const std::int64_t d : axes.d)
      for (const bool causal : axes.causal)
        for (const std::int64_t sq : axes.sq)
          for (const std::int64_t sk : axes.sk.empty() ? std::vector<std::int64_t>{sq} : axes.sk) {
            rows.push_back(row_of(bench, op, dtype, sq, sk, d));
            rows.back().causal = causal;
            rows.back().threads = threads;
          }
}

int run(const Bench& bench) {
  std::vector<Row> rows;
  for (const Op op : bench.op)
    for (const std::int64_t threads : thread_counts(bench)) add_rows(rows, bench, op, static_cast<int>(threads));
  Peaks peaks;
  std::vector<std::string> impossible;
  std::string last_heading;
  for (Row row : rows) {
    if (!bench.json && heading(row.op) != last_heading) fmt::print("{}", last_heading = heading(row.op));
    const Progress progress(bench.progress, fmt::format("bench: {} sq {} sk {} d {} {}", name(row.op), row.sq, row.sk,
                                                        row.d, narrows::name(row.dtype)));
    measure(row, peaks);
    fmt::print("{}", bench.json ? as_json(row) + "\n" : as_text(row));
    std::fflush(stdout);
    if (row.impossible())
      impossible.push_back(fmt::format("{} {} sq={} sk={} d={} threads={}: {:.3f} of the peak, above {}", name(row.op),
                                       narrows::name(row.dtype), row.sq, row.sk, row.d, row.threads, row.fraction(),
                                       row.most_fraction()));
  }
  if (!impossible.empty())
    fmt::print(stderr, "narrows: bench: faster than the machine: {}\n", joined(impossible, "; "));
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

Op parse_op(const std::string& option, std::string_view text) {
  for (const Op op : {Op::forward, Op::backward, Op::decode})
    if (text == name(op)) return op;
  refuse_value(option, files::printable(text), "must be forward, backward or decode", "forward");
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
  add_axis(command, "--op", bench.op, "forward, backward, decode; default all", parse_op);
  add_axis(command, "--dtype", bench.dtype, "fp32, bf16, fp16; default all", parse_row_dtype);
  add_axis(command, "--d", bench.d, "Head dims; default 64,128, of decode 128", parse_size);
  add_axis(command, "--sq", bench.sq,
           "Query sequence lengths; default 512,1024,2048,4096; of backward 1024, of decode 1", parse_size);
  add_axis(command, "--causal", bench.causal, "true, false; default both, of decode false", parse_row_causal);
  add_axis(command, "--threads", bench.threads, "Default 1 and every core",
           [](const std::string& option, std::string_view text) { return parse_integer(option, text, 1, 1024); });
  const auto size = [&](const char* name, std::optional<std::int64_t> Bench::*member, const char* help) {
    add_option(command, name, {"N", help}, [&bench, member](const std::string& option, const std::string& text) {
      bench.*member = parse_size(option, text);
    });
  };
  size("--b", &Bench::b, "Batch; default 1");
  size("--h", &Bench::h, "Query heads; default 16384 / sq, at most 32; of decode 32");
  size("--hk", &Bench::hk, "Kv heads; default h, of decode h / 4");
  size("--sk", &Bench::sk, "Key sequence length; default sq, of decode 4096 and 16384");
  size("--dv", &Bench::dv, "Head dim of v; default d");
}

constexpr const char* kHelp =
    "Without options the whole table. An option replaces the values of its axis, inside the table or not.\n"
    "ms is the median; peak is a loop measured beside each row, of multiply-adds (TFLOP/s) or, for decode, of reads of "
    "as\n"
    "many bytes (GB/s); causal counts half the pairs. A fraction of the peak above 1.02 (decode 1.05) cannot be and "
    "ends\n"
    "in exit code 1.\n\n"
    "  narrows bench\n"
    "  narrows bench --op backward,decode --threads 1\n"
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
