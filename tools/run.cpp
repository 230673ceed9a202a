// narrows run: attention on the tensors of files.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <system_error>

#include <fmt/format.h>

#include "api/machine.hpp"
#include "core/environment.hpp"
#include "core/error.hpp"
#include "plan/plan.hpp"
#include "tools/commands.hpp"
#include "tools/files/failure.hpp"
#include "tools/files/output_file.hpp"
#include "tools/job.hpp"
#include "tools/progress.hpp"
#include "tools/text.hpp"

namespace narrows::cli {
namespace {

struct Run {
  Reading reading;
  CallOptions options;
  std::string output;
  std::optional<std::int64_t> repeat;
  DeviceChoice device;
  bool check = false, json = false;
  ProgressMode progress;
};

/// Before anything long: the file can be written, and its format holds what will be.
void check_output(const std::string& path, const std::vector<std::string>& inputs, const std::vector<Job>& jobs) {
  const std::string extension = std::filesystem::path(path).extension().string();
  if (extension != ".npz" && extension != ".safetensors")
    files::fail(path, "results are several tensors a call; name a .npz or .safetensors file");
  std::error_code none;
  for (const std::string& input : inputs)
    if (std::filesystem::equivalent(path, input, none))
      refuse_value("--output", path, "is read too; results would replace its q, k and v");
  for (const Job& job : jobs)
    for (const Result& result : job.results)
      if (extension == ".npz" && result.array.dtype == DType::bf16)
        files::fail(path, "NumPy has no bf16; name a .safetensors file");
  const files::OutputFile probe(path);
}

/// One run to warm up and `repeat` timed ones; without a number as many as fit in 0.3 s, or the first alone.
std::vector<double> timed(const Job& job, std::optional<std::int64_t> repeat) {
  constexpr double kBudget = 0.3;
  constexpr double kMost = 50;
  const double first = job.seconds();
  const std::int64_t runs =
      repeat.value_or(static_cast<std::int64_t>(std::min(kMost, kBudget / std::max(first, 1e-9))));
  if (runs == 0) return {first};
  std::vector<double> seconds;
  for (std::int64_t run = 0; run < runs; ++run) seconds.push_back(job.seconds());
  std::sort(seconds.begin(), seconds.end());
  return seconds;
}

int threads_of(const Job& job) {
  const std::string_view forced = job.call.options.family;
  const std::string family = forced.empty() ? environment::family() : std::string(forced);
  return choose(job.problem, job.work, machine_of(job.problem.device), family).plan.threads;
}

Report report_on(const Job& job, const Run& run) {
  const FileCall& call = job.call;
  Report report{call.prefix, job.problem, job.work, call.in.q, call.in.k, call.in.v, "", "", 0, {}, {}, {}};
  if (job.backward)
    report.dout =
        call.dout.given() ? "of the file" : narrows::text("generated, seed ", run.reading.dout_seed.value_or(0));
  in_the_name_of(job.label(), [&] {
    report.machine = machine_of(job.problem.device).name;
    if (!job.gpu) report.threads = threads_of(job);
    {
      const Progress progress(run.progress, job.label() + (job.backward ? "gradients" : "attention"));
      report.seconds = timed(job, run.repeat);
      job.fetch();
    }
    report.differences = job.differences();
    if (run.check) {
      const Progress progress(run.progress, fmt::format("{}check in fp64, {}", job.label(),
                                                        with_prefix(job.work.three_kernel_flops, "FLOP")));
      report.verdicts = job.check();
    }
  });
  return report;
}

int run(Run& run) {
  if (run.reading.dout_seed && !run.reading.backward)
    refuse_value("--dout-seed", std::to_string(*run.reading.dout_seed), "needs --backward");
  FileCalls file_calls = read_calls(run.reading, run.options);
  note_unused(file_calls);
  std::vector<Job> jobs;
  for (FileCall& call : file_calls.calls) jobs.push_back(prepared(std::move(call), run.reading));
  if (!run.output.empty()) check_output(run.output, run.reading.paths, jobs);
  for (Job& job : jobs) move_to(job, device_for(job.call, job.backward, run.device, job.label()));

  bool passed = true;
  for (const Job& job : jobs) {
    save_forward(job);
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
    for (const Job& job : jobs)
      for (const Result& result : job.results) arrays.push_back(result.array);
    files::write_tensor_file(run.output, arrays);
  }
  return passed ? kOk : kCheckFailed;
}

constexpr const char* kRunHelp =
    "A file holds q (b, sq, h, d), k (b, sk, hk, d) and v (b, sk, hk, dv), or q (total, h, d) with cu_seqlens_q, and\n"
    "optionally bias, mask, alibi_slopes (slopes), sinks, shift, key_begin, key_end, cu_seqlens_q, cu_seqlens_k (or "
    "one\n"
    "cu_seqlens), seqused_q, seqused_k; o and lse are compared with the result. Names LAYER.q, LAYER.k, LAYER.v, ... "
    "make a call\n"
    "each, and a tensor without prefix belongs to every call. Several .npy files are named by their stems.\n"
    "With cache_seqlens, block_table, cache_batch_idx, leftpad, k_new, v_new, cu_seqlens_k_new, rotary_cos, rotary_sin "
    "or\n"
    "rotary_base, k and v are a KV cache; -o then also writes it with the new keys in their places.\n"
    "--backward computes o and lse, then the gradients, from dout (and dlse) of the file or a generated dout.\n\n"
    "  narrows run layers.safetensors --check\n"
    "  narrows run layers.safetensors --backward --check -o gradients.safetensors\n"
    "  narrows run q.npy k.npy v.npy --causal --window 1024,0 -o result.npz\n"
    "  narrows run model.npz --dtype bf16 --check --json";

}  // namespace

Command add_run(CLI::App& app) {
  CLI::App& command = add_command(app, "run", "Compute attention on the tensors of files, time and check it", kRunHelp);
  const auto options = std::make_shared<Run>();
  add_files(command, options->reading.paths, ".safetensors, .npz, or several .npy", true);
  add_option(command, "-o,--output", {"FILE", "Write the results to this .safetensors or .npz file"},
             [options](const auto&, const auto& text) { options->output = text; });
  add_flag(command, "--check", options->check,
           {"", "Compare with attention in fp64; exit code 1 where a result is wrong"});
  add_flag(command, "--backward", options->reading.backward,
           {"", "Gradients: dq, dk, dv, and dbias, dslopes, dsinks of what is given"});
  add_option(
      command, "--dout-seed", {"N", "Seed of the dout that is generated where no file has one; default 0"},
      [options](const auto& option, const auto& text) { options->reading.dout_seed = parse_unsigned(option, text); });
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
  add_device_option(command, options->device);
  return [options] { return run(*options); };
}

}  // namespace narrows::cli
