// narrows bench: the table of measurements.
#include <cstdio>
#include <memory>
#include <optional>
#include <vector>

#include <fmt/format.h>

#include "core/error.hpp"
#include "cpu/machine.hpp"
#include "tools/bench_machine.hpp"
#include "tools/bench_measure.hpp"
#include "tools/bench_peers.hpp"
#include "tools/bench_table.hpp"
#include "tools/commands.hpp"
#include "tools/files/failure.hpp"
#include "tools/progress.hpp"
#include "tools/text.hpp"

namespace narrows::cli {
namespace {

struct Bench {
  Selection selection;
  std::string python;  // that has peers; empty: python3, if it has any
  bool no_peers = false;
  bool json = false;
  ProgressMode progress;
};

Peers start_peers(const Bench& bench) {
  if (bench.no_peers && !bench.python.empty())
    refuse_value("--peers", files::printable(bench.python), "contradicts --no-peers");
  if (bench.no_peers) return {};
  const Progress progress(bench.progress, "bench: looking for peers");
  return Peers(bench.python.empty() ? "python3" : bench.python, !bench.python.empty());
}

std::string label_of(const Row& row) {
  return fmt::format("{} {} sq={} sk={} d={}{}{} threads={}", name(row.op), narrows::name(row.dtype), row.sq, row.sk,
                     row.d, row.causal ? " causal" : "",
                     row.special == Case::plain ? "" : fmt::format(" {}", name(row.special)), row.threads);
}

int run(const Bench& bench) {
  const std::vector<Row> rows = rows_of(bench.selection, cpu::machine().threads, cpu::cache_bytes(3));
  Peers peers = start_peers(bench);
  fmt::print(bench.json ? stderr : stdout, "{}", machine_text(peers));
  Peaks peaks;
  std::vector<std::string> impossible;
  std::string last_heading;
  std::size_t count = 0;
  for (Row row : rows) {
    if (!bench.json && heading(row.op) != last_heading) fmt::print("{}", last_heading = heading(row.op));
    std::fflush(stdout);
    {
      const Progress progress(bench.progress, fmt::format("bench {}/{}: {}", ++count, rows.size(), label_of(row)));
      measure(row, peaks, peers, bench.selection.quick ? kQuickEffort : kWholeEffort);
    }
    fmt::print("{}", bench.json ? as_json(row) + "\n" : as_text(row));
    std::fflush(stdout);
    if (row.impossible())
      impossible.push_back(
          fmt::format("{}: {:.3f} of the peak, above {}", label_of(row), row.fraction(), row.most_fraction()));
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
  for (const Op op : kOps)
    if (text == name(op)) return op;
  refuse_value(option, files::printable(text), "must be forward, backward or decode", "forward");
}

Case parse_case(const std::string& option, std::string_view text) {
  std::vector<std::string> names;
  for (const Case special : kCases) {
    if (text == name(special)) return special;
    names.emplace_back(name(special));
  }
  refuse_value(option, files::printable(text), "must be one of " + joined(names, ", "), "plain");
}

DType parse_row_dtype(const std::string& option, std::string_view text) {
  const DType dtype = parse_dtype(option, text);
  if (dtype == DType::fp64) refuse_value(option, text, "has no measured peak; must be fp32, bf16 or fp16", "fp32");
  return dtype;
}

bool parse_row_causal(const std::string& option, std::string_view text) {
  if (text != "true" && text != "false" && text != "bottom_right" && text != "none")
    refuse_value(option, files::printable(text), "must be true or false");
  return text == "true" || text == "bottom_right";
}

void add_options(CLI::App& command, Selection& selection) {
  add_axis(command, "--op", selection.op, "forward, backward, decode; default all", parse_op);
  add_axis(command, "--dtype", selection.dtype, "fp32, bf16, fp16; default all", parse_row_dtype);
  add_axis(command, "--d", selection.d, "Head dims; default 64,128", parse_size);
  add_axis(command, "--sq", selection.sq,
           "Query sequence lengths; default of forward 512,1024,4096,16384, of its cases 2048, of window512 and varlen "
           "16384, of backward 512,1024,4096, of decode 1",
           parse_size);
  add_axis(command, "--causal", selection.causal, "true, false; default both in plain rows, gqa4 and varlen",
           parse_row_causal);
  add_axis(command, "--case", selection.special,
           "plain, bias, mask, softcap, alibi, dropout, window512, varlen, gqa4, and of decode paged16; default all "
           "(backward: plain), plain alone where a size is given",
           parse_case);
  add_axis(command, "--threads", selection.threads, "Default 1 and every core",
           [](const std::string& option, std::string_view text) { return parse_integer(option, text, 1, 1024); });
  const auto size = [&](const char* name, std::optional<std::int64_t> Selection::*member, const char* help) {
    add_option(command, name, {"N", help}, [&selection, member](const std::string& option, const std::string& text) {
      selection.*member = parse_size(option, text);
    });
  };
  size("--b", &Selection::b, "Batch; default 1");
  size("--h", &Selection::h, "Query heads; default 16384 / sq, at most 32; of decode 32");
  size("--hk", &Selection::hk, "Kv heads; default h, of decode and gqa4 h / 4");
  size("--sk", &Selection::sk, "Key sequence length; default sq, of decode two: within the last cache and beyond it");
  size("--dv", &Selection::dv, "Head dim of v; default d");
  add_flag(command, "--quick", selection.quick, {"", "Few rows, each measured briefly"});
}

constexpr const char* kBenchHelp =
    "Without options the whole table. An option replaces the values of its axis, inside the table or not.\n"
    "ms is the median, best_ms the least; rate and fraction are of best_ms. peak is a loop measured beside each row: "
    "of\n"
    "multiply-adds, for bf16 of its dot products where the instruction set has them (TFLOP/s), for decode of reads of "
    "as\n"
    "many bytes (GB/s). Causal counts half the pairs, window512 and varlen the visible ones. A fraction above 1.02\n"
    "(decode 1.05) cannot be and ends in exit code 1. ratio is the time of the fastest peer by ours.\n\n"
    "  narrows bench --quick\n"
    "  narrows bench --op backward,decode --threads 1\n"
    "  narrows bench --dtype bf16 --sq 1024,4096 --causal true --json\n"
    "  narrows bench --case softcap,window512 --peers venv/bin/python";

}  // namespace

Command add_bench(CLI::App& app) {
  CLI::App& command = add_command(app, "bench", "Measure the table of benchmarks, or rows of one's own", kBenchHelp);
  const auto bench = std::make_shared<Bench>();
  add_options(command, bench->selection);
  add_option(command, "--peers",
             {"PYTHON",
              "Interpreter with onnxruntime and onnx, torch or numpy, which are timed beside each row; default "
              "python3 if it has one of them"},
             [bench](const std::string& option, const std::string& text) {
               if (text.empty()) refuse_value(option, "''", "must name a Python interpreter", "python3");
               bench->python = text;
             });
  add_flag(command, "--no-peers", bench->no_peers, {"", "Measure nothing but narrows"});
  add_flag(command, "--json", bench->json, {"", "One row a line on stdout, nothing else there"});
  add_flag(command, "--progress", bench->progress.asked,
           {"", "Say on stderr what takes long, also where that is no terminal"});
  return [bench] { return run(*bench); };
}

}  // namespace narrows::cli
