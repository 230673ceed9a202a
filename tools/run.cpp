// narrows run: attention on the tensors of files.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <system_error>
#include <tuple>

#include <fmt/format.h>

#include "core/environment.hpp"
#include "core/error.hpp"
#include "cpu/criterion.hpp"
#include "cpu/machine.hpp"
#include "cpu/reference_numbers.hpp"
#include "plan/plan.hpp"
#include "tools/calls.hpp"
#include "tools/commands.hpp"
#include "tools/files/failure.hpp"
#include "tools/files/layout.hpp"
#include "tools/files/output_file.hpp"
#include "tools/progress.hpp"
#include "tools/report.hpp"
#include "tools/text.hpp"

namespace narrows::cli {
namespace {

struct Run {
  Reading reading;
  CallOptions options;
  std::string output;
  std::optional<std::int64_t> repeat;
  bool check = false, json = false;
  ProgressMode progress;
};

/// A call with its results and what they are called in messages.
struct Job {
  FileCall call;
  Problem problem;
  Work work;
  Outputs out;
  std::vector<files::Array> results;  // o in the file's order of axes, lse
  std::string label() const { return call.prefix.empty() ? "" : call.prefix + ": "; }
};

template <class Body> auto in_the_name_of(const Job& job, Body body) {
  try {
    return body();
  } catch (const Error& error) {
    throw Error(error.code(), job.label() + error.what());
  }
}

/// A new tensor of row-major memory, as an array to write.
files::Array new_array(const std::string& name, DType dtype, const Dims& shape) {
  const std::int64_t bytes = files::dense_bytes(name, shape, dtype);
  const files::Memory memory = files::allocate(name, static_cast<std::size_t>(bytes));
  std::memset(memory.bytes.data(), 0xFF, memory.bytes.size());  // NaN: what is not written shows
  return {name, dtype, shape, files::row_major_strides(shape), memory.bytes, memory.owner};
}

Tensor view_of_array(const files::Array& array) {
  return {const_cast<std::byte*>(array.bytes.data()), array.dtype, array.shape, array.strides, Device{}};
}

void allocate_results(Job& job, AxisOrder order) {
  const Inputs& in = job.call.in;
  Dims o = in.q.shape;
  const std::size_t rank = o.rank();
  o[rank - 1] = job.problem.value_dim;
  const Dims lse = rank == 3 ? Dims{o[1], o[0]} : Dims{o[0], o[2], o[1]};
  if (order == AxisOrder::bhsd) std::swap(o[rank - 3], o[rank - 2]);
  job.results = {new_array(full_name(job.call.prefix, "o"), in.q.dtype, o),
                 new_array(full_name(job.call.prefix, "lse"), accumulator(in.q.dtype), lse)};
  job.out.o = view_of_array(job.results[0]);
  if (order == AxisOrder::bhsd) job.out.o = exchanged(job.out.o);
  job.out.lse = view_of_array(job.results[1]);
}

Job prepared(FileCall call, AxisOrder order) {
  Job job;
  job.call = std::move(call);
  in_the_name_of(job, [&] {
    const Call checked = make_explained(job.call.in, job.call.options);
    job.problem = checked.problem;
    job.work = work(checked);
    allocate_results(job, order);
    for (const auto& [name, theirs, ours] :
         {std::tuple{"o", job.call.o, job.out.o}, {"lse", job.call.lse, job.out.lse}})
      if (theirs.given() && theirs.shape != ours.shape)
        refuse_value(name, narrows::text("shape ", theirs.shape),
                     narrows::text("the file's own must have the shape of the result, ", ours.shape));
  });
  return job;
}

/// Before anything long: the file can be written, and its format holds what will be.
void check_output(const std::string& path, const std::vector<std::string>& inputs, const std::vector<Job>& jobs) {
  const std::string extension = std::filesystem::path(path).extension().string();
  if (extension != ".npz" && extension != ".safetensors")
    files::fail(path, "results are two tensors a call, o and lse; name a .npz or .safetensors file");
  std::error_code none;
  for (const std::string& input : inputs)
    if (std::filesystem::equivalent(path, input, none))
      refuse_value("--output", path, "is read too; results would replace its q, k and v");
  for (const Job& job : jobs)
    if (extension == ".npz" && job.out.o.dtype == DType::bf16)
      files::fail(path, "NumPy has no bf16; name a .safetensors file");
  const files::OutputFile probe(path);
}

double seconds_of(const Job& job) {
  const auto begin = std::chrono::steady_clock::now();
  forward(job.call.in, job.out, job.call.options);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// One run to warm up and `repeat` timed ones; without a number as many as fit in 0.3 s, or the first alone.
std::vector<double> timed(const Job& job, std::optional<std::int64_t> repeat) {
  constexpr double kBudget = 0.3;
  constexpr double kMost = 50;
  const double first = seconds_of(job);
  const std::int64_t runs =
      repeat.value_or(static_cast<std::int64_t>(std::min(kMost, kBudget / std::max(first, 1e-9))));
  if (runs == 0) return {first};
  std::vector<double> seconds;
  for (std::int64_t run = 0; run < runs; ++run) seconds.push_back(seconds_of(job));
  std::sort(seconds.begin(), seconds.end());
  return seconds;
}

Difference compared(std::string name, const Tensor& ours, const Tensor& theirs) {
  const reference::View a(ours), b(theirs);
  Difference difference{std::move(name), 0};
  const reference::Index count = reference::elements(ours.shape);
  Dims at = reference::first_of(ours.shape);
  for (reference::Index element = 0; element < count; ++element, reference::advance(at, ours.shape)) {
    const double x = a.element(at), y = b.element(at);
    if (x == y || (std::isnan(x) && std::isnan(y))) continue;
    const double distance = std::abs(x - y);
    difference.largest =
        std::max(difference.largest, std::isnan(distance) ? std::numeric_limits<double>::infinity() : distance);
  }
  return difference;
}

Report report_on(const Job& job, const Run& run) {
  const FileCall& call = job.call;
  Report report{call.prefix, job.problem, job.work, call.in.q, call.in.k, call.in.v, 1, {}, {}, {}};
  in_the_name_of(job, [&] {
    const std::string family = call.options.family.empty() ? environment::family() : std::string(call.options.family);
    report.threads = choose(job.problem, job.work, cpu::machine(), family).plan.threads;
    {
      const Progress progress(run.progress, job.label() + "attention");
      report.seconds = timed(job, run.repeat);
    }
    if (call.o.given()) report.differences.push_back(compared("o", job.out.o, call.o));
    if (call.lse.given()) report.differences.push_back(compared("lse", job.out.lse, call.lse));
    if (run.check) {
      const Progress progress(run.progress, fmt::format("{}check in fp64, {}", job.label(),
                                                        with_prefix(job.work.three_kernel_flops, "FLOP")));
      report.verdicts = check_forward(call.in, job.out, call.options);
    }
  });
  return report;
}

int run(Run& run) {
  FileCalls file_calls = read_calls(run.reading, run.options);
  note_unused(file_calls);
  std::vector<Job> jobs;
  for (FileCall& call : file_calls.calls) jobs.push_back(prepared(std::move(call), run.reading.order));
  if (!run.output.empty()) check_output(run.output, run.reading.paths, jobs);

  bool passed = true;
  for (const Job& job : jobs) {
    const Report report = report_on(job, run);
    passed = passed && report.passed();
    if (run.json)
      fmt::print("{}\n", json(report));
    else
      fmt::print("{}{}", &job == jobs.data() ? "" : "\n", text(report));
    std::fflush(stdout);
  }
  if (!run.output.empty()) {
    std::vector<files::Array> arrays;
    for (Job& job : jobs) arrays.insert(arrays.end(), job.results.begin(), job.results.end());
    files::write_tensor_file(run.output, arrays);
  }
  return passed ? kOk : kCheckFailed;
}

constexpr const char* kHelp =
    "A file holds q (b, sq, h, d), k (b, sk, hk, d) and v (b, sk, hk, dv), or q (total, h, d) with cu_seqlens_q, and\n"
    "optionally bias, mask, alibi_slopes (slopes), sinks, shift, cu_seqlens_q, cu_seqlens_k (or one cu_seqlens),\n"
    "seqused_q, seqused_k; o and lse are compared with the result. Names LAYER.q, LAYER.k, LAYER.v, ... make a call\n"
    "each, and a tensor without prefix belongs to every call. Several .npy files are named by their stems.\n\n"
    "  narrows run layers.safetensors --check\n"
    "  narrows run q.npy k.npy v.npy --causal --window 1024,0 -o result.npz\n"
    "  narrows run model.npz --dtype bf16 --check --json";

}  // namespace

Command add_run(CLI::App& app) {
  CLI::App& command = add_command(app, "run", "Compute attention on the tensors of files, time and check it", kHelp);
  const auto options = std::make_shared<Run>();
  add_files(command, options->reading.paths, ".safetensors, .npz, or several .npy", true);
  add_option(command, "-o,--output", {"FILE", "Write o and lse to this .safetensors or .npz file"},
             [options](const auto&, const auto& text) { options->output = text; });
  add_flag(command, "--check", options->check,
           {"", "Compare with attention in fp64; exit code 1 where a result is wrong"});
  add_option(
      command, "--repeat", {"N", "Timed runs after the first; default: as many as fit in 0.3 s"},
      [options](const auto& option, const auto& text) { options->repeat = parse_integer(option, text, 1, 1000000); });
  add_option(command, "--dtype", {"TYPE", "Round q, k and v to fp16, bf16, fp32 or fp64 first"},
             [options](const auto& option, const auto& text) { options->reading.dtype = parse_dtype(option, text); });
  add_flag(command, "--json", options->json, {"", "One object a line on stdout, nothing else there"});
  add_flag(command, "--progress", options->progress.asked,
           {"", "Say on stderr what takes long, also where that is no terminal"});
  add_reading_options(command, options->reading);
  add_call_options(command, options->options);
  return [options] { return run(*options); };
}

}  // namespace narrows::cli
