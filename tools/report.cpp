#include "tools/report.hpp"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tools/text.hpp"

namespace narrows::cli {
namespace {

using Json = nlohmann::ordered_json;

Json numbers(const Dims& dims) { return Json(std::vector<std::int64_t>(dims.begin(), dims.end())); }

std::string line(std::string_view label, const std::string& content) {
  return fmt::format("  {:<15}{}\n", label, content);
}

std::string verdict_line(const Verdict& verdict, std::size_t width, DType dtype) {
  return fmt::format("{:<{}}{:.2e}, three-kernel attention in {} {:.2e}: {}", verdict.name, width, verdict.error,
                     name(dtype), verdict.plain_error, verdict.passed ? "passed" : "FAILED");
}

/// Of a column of names.
template <class Named> std::size_t width_of(const std::vector<Named>& rows) {
  std::size_t width = 4;
  for (const Named& row : rows) width = std::max(width, row.name.size() + 1);
  return width;
}

Json verdict_json(const Verdict& verdict) {
  return {{"passed", verdict.passed}, {"error", verdict.error},          {"plain_error", verdict.plain_error},
          {"worst", verdict.worst},   {"where", numbers(verdict.where)}, {"ours", verdict.ours},
          {"exact", verdict.exact},   {"limit", verdict.limit}};
}

double ratio(std::int64_t more, std::int64_t less) {
  return less > 0 ? static_cast<double>(more) / static_cast<double>(less) : 0;
}

}  // namespace

double Report::median() const {
  const std::size_t middle = seconds.size() / 2;
  return seconds.size() % 2 == 1 ? seconds[middle] : (seconds[middle - 1] + seconds[middle]) / 2;
}

bool Report::passed() const {
  return std::all_of(verdicts.begin(), verdicts.end(), [](const Verdict& verdict) { return verdict.passed; });
}

std::string text(const Report& report) {
  const Work& work = report.work;
  const double median = report.median();
  std::string lines = fmt::format("{}{}\n", report.call.empty() ? "" : report.call + ": ", report.problem.text());
  lines += line("shape", fmt::format("q {}  k {}  v {}", to_text(report.q.shape), to_text(report.k.shape),
                                     to_text(report.v.shape)));
  if (!report.dout.empty()) lines += line("dout", report.dout);
  const std::string where = report.problem.device.kind == DeviceKind::cpu
                                ? fmt::format("{} thread{}", report.threads, report.threads == 1 ? "" : "s")
                                : fmt::format("{} {}", to_text(report.problem.device), report.machine);
  lines += line("time", fmt::format("{} (median of {}, best {}), {}", duration(median), report.seconds.size(),
                                    duration(report.seconds.front()), where));
  lines += line("speed", fmt::format("{:.1f} GFLOP/s", work.flops / median / 1e9));
  lines += line("memory moved", fmt::format("{}; three-kernel attention {}, {:.1f} times as much",
                                            with_prefix(static_cast<double>(work.fused_bytes), "B"),
                                            with_prefix(static_cast<double>(work.three_kernel_bytes), "B"),
                                            ratio(work.three_kernel_bytes, work.fused_bytes)));
  std::string_view label = "error vs fp64";
  for (const Verdict& verdict : report.verdicts) {
    lines += line(label, verdict_line(verdict, width_of(report.verdicts), report.problem.dtype));
    if (!verdict.passed) lines += line("", verdict.text());
    label = "";
  }
  label = "vs file's own";
  for (const Difference& difference : report.differences) {
    lines += line(
        label, fmt::format("{:<{}}{:.2e} at most", difference.name, width_of(report.differences), difference.largest));
    label = "";
  }
  return lines;
}

std::string json(const Report& report) {
  const Problem& problem = report.problem;
  const Work& work = report.work;
  Json object{{"call", report.call},
              {"problem", problem.text()},
              {"dtype", name(problem.dtype)},
              {"b", problem.batch},
              {"h", problem.heads},
              {"hk", problem.kv_heads},
              {"sq", problem.max_queries},
              {"sk", problem.max_keys},
              {"d", problem.head_dim},
              {"dv", problem.value_dim},
              {"q", numbers(report.q.shape)},
              {"k", numbers(report.k.shape)},
              {"v", numbers(report.v.shape)},
              {"device", to_text(problem.device)},
              {"machine", report.machine},
              {"threads", report.threads},
              {"repeat", report.seconds.size()},
              {"ms", report.median() * 1e3},
              {"best_ms", report.seconds.front() * 1e3},
              {"flops", work.flops},
              {"gflops", work.flops / report.median() / 1e9},
              {"fused_bytes", work.fused_bytes},
              {"three_kernel_bytes", work.three_kernel_bytes},
              {"bytes_ratio", ratio(work.three_kernel_bytes, work.fused_bytes)}};
  if (!report.dout.empty()) object["dout"] = report.dout;
  if (!report.verdicts.empty()) {
    object["passed"] = report.passed();
    for (const Verdict& verdict : report.verdicts) object["check"][verdict.name] = verdict_json(verdict);
  }
  for (const Difference& difference : report.differences) object["file"][difference.name] = difference.largest;
  return object.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace narrows::cli
