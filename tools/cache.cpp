// narrows cache: the compiled GPU kernels that are kept.
#include <algorithm>
#include <chrono>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.hpp"
#include "cuda/disk.hpp"
#include "tools/commands.hpp"
#include "tools/files/failure.hpp"
#include "tools/files/output_file.hpp"
#include "tools/kernels.hpp"
#include "tools/text.hpp"

namespace narrows::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Ahead {
  std::vector<std::string> architectures;
  std::vector<DType> dtypes;
  std::int64_t threads = std::max(1u, std::thread::hardware_concurrency());
  std::int64_t part = 1, parts = 1;
  std::string file;
  bool plain = false, json = false;
};

/// The constants of config.cuh: {"kHeadDim": "128", ...}.
Json constants(const Program& program) {
  Json values = Json::object();
  std::istringstream lines(program.config);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string constant, type, name, equals, value;
    words >> constant >> type >> name >> equals >> value;
    if (constant == "constexpr") values[name] = value.substr(0, value.find(';'));
  }
  return values;
}

Json as_json(const cuda::Binary& binary) {
  const cuda::Usage& usage = binary.usage;
  return {{"function", binary.function},
          {"architecture", binary.architecture},
          {"nvrtc", binary.compiler.text()},
          {"registers", usage.registers},
          {"stack_bytes", usage.stack_bytes},
          {"spill_store_bytes", usage.spill_store_bytes},
          {"spill_load_bytes", usage.spill_load_bytes},
          {"shared_bytes", usage.shared_bytes},
          {"serialised", binary.log.find("(C75") != std::string::npos},  // wgmma, which ptxas warns of
          {"image_bytes", binary.image.size()},
          {"seconds", binary.seconds}};
}

std::string date(std::int64_t nanoseconds) {
  return fmt::format("{:%Y-%m-%d %H:%M}", fmt::gmtime(static_cast<std::time_t>(nanoseconds / 1'000'000'000)));
}

/// The disk cache, or Error where there is none to speak of.
std::unique_ptr<cuda::DiskCache> disk() {
  auto found = std::make_unique<cuda::DiskCache>(cuda::disk_settings());
  if (!found->folder()) refuse_value("NARROWS_CACHE", cuda::disk_settings().folder, found->reason());
  return found;
}

int list(bool json) {
  std::int64_t total = 0;
  const std::vector<cuda::DiskCache::Entry> entries = disk()->entries();
  for (const cuda::DiskCache::Entry& entry : entries) {
    total += entry.bytes;
    const cuda::Binary& binary = entry.binary;
    if (json) {
      Json object = as_json(binary);
      object["bytes"] = entry.bytes;
      object["used"] = static_cast<double>(entry.used) / 1e9;
      fmt::print("{}\n", object.dump(-1, ' ', false, Json::error_handler_t::replace));
      continue;
    }
    fmt::print("{:<24}{:<8} nvrtc {:<6}{:>4} registers{:>6} B spilled{:>10}  used {} UTC\n",
               files::printable(binary.function), files::printable(binary.architecture), binary.compiler.text(),
               binary.usage.registers, binary.usage.spill_store_bytes,
               with_prefix(static_cast<double>(entry.bytes), "B"), date(entry.used));
  }
  if (!json)
    fmt::print("{} kernels, {} in {}\n", entries.size(), with_prefix(static_cast<double>(total), "B"),
               files::printable(cuda::disk_settings().folder));
  return kOk;
}

int clear() {
  fmt::print("{} kernels removed from {}\n", disk()->clear(), files::printable(cuda::disk_settings().folder));
  return kOk;
}

std::vector<cuda::PackEntry> fetch_planned(const Ahead& options) {
  const auto start = std::chrono::steady_clock::now();
  const std::vector<std::string> architectures =
      options.architectures.empty() ? own_architectures() : options.architectures;
  const std::vector<Wanted> wanted =
      part_of(planned(architectures, options.plain, options.dtypes), options.part, options.parts);
  std::vector<cuda::PackEntry> entries = fetch(cuda::cache(), wanted, static_cast<int>(options.threads));
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (std::size_t i = 0; options.json && i < entries.size(); ++i) {
    Json object = as_json(entries[i].binary);
    object["constants"] = constants(wanted[i].program);
    fmt::print("{}\n", object.dump());
  }
  if (!options.json) fmt::print("{} kernels for {} in {}\n", entries.size(), joined(architectures), duration(seconds));
  return entries;
}

int warm(const Ahead& options) {
  disk();
  fetch_planned(options);
  return kOk;
}

int pack(const Ahead& options) {
  files::OutputFile file(options.file);
  const std::string bytes = cuda::pack_bytes(fetch_planned(options));
  file.write(std::string_view(bytes));
  file.commit();
  if (!options.json)
    fmt::print("{} in {}\n", with_prefix(static_cast<double>(bytes.size()), "B"), files::printable(options.file));
  return kOk;
}

DType parse_gpu_dtype(const std::string& option, std::string_view text) {
  const DType dtype = parse_dtype(option, text);
  if (dtype == DType::fp64) refuse_value(option, text, "GPUs compute in fp16, bf16 and fp32; nearest legal: fp32");
  return dtype;
}

void add_ahead_options(CLI::App& command, const std::shared_ptr<Ahead>& options) {
  add_option(command, "--arch", {"LIST", "Architectures, as sm_80,sm_90a; default those of this machine's GPUs"},
             [options](const std::string&, const std::string& value) {
               for (const std::string_view name : split(value)) options->architectures.emplace_back(name);
             });
  add_option(command, "--dtype", {"LIST", "Only kernels of these dtypes, as fp16,bf16"},
             [options](const std::string& option, const std::string& value) {
               for (const std::string_view dtype : split(value))
                 options->dtypes.push_back(parse_gpu_dtype(option, dtype));
             });
  add_option(command, "--threads", {"N", "Kernels compiled at once; default one for each core"},
             [options](const std::string& option, const std::string& value) {
               options->threads = parse_integer(option, value, 1, 1024);
             });
  add_flag(command, "--plain", options->plain,
           {"", "Only kernels without score rules, mask tensors and dropout, one of each dtype and head dims"});
  add_option(command, "--part", {"K/N", "Every N-th of these kernels, from the K-th"},
             [options](const std::string& option, const std::string& value) {
               const std::size_t slash = value.find('/');
               if (slash == std::string::npos) refuse_value(option, value, "must be K/N, as 2/4");
               options->parts = parse_integer(option, value.substr(slash + 1), 1, 1000);
               options->part = parse_integer(option, value.substr(0, slash), 1, options->parts);
             });
  add_flag(command, "--json", options->json, {"", "One object a kernel on stdout, nothing else there"});
}

constexpr const char* kHelp =
    "The folder is NARROWS_CACHE, else narrows in XDG_CACHE_HOME, else ~/.cache/narrows. A pack is a file of kernels "
    "that\n"
    "needs no compiler where it is used: put it into that folder as NAME.pack, or beside the library as "
    "narrows.pack.\n\n"
    "  narrows cache list\n"
    "  narrows cache warm --arch sm_90a\n"
    "  narrows cache pack narrows.pack --arch sm_80,sm_90a";

}  // namespace

Command add_cache(CLI::App& app) {
  CLI::App& command = add_command(app, "cache", "List, make or remove the compiled GPU kernels that are kept", kHelp);
  require_command(command);
  const auto ahead = std::make_shared<Ahead>();
  const auto json = std::make_shared<bool>(false);
  CLI::App& lists = add_command(command, "list", "Say what is kept, the longest unused first", "");
  add_flag(lists, "--json", *json, {"", "One object a kernel on stdout, nothing else there"});
  CLI::App& warms = add_command(command, "warm", "Compile the planned kernels that are not kept yet", "");
  add_ahead_options(warms, ahead);
  CLI::App& packs = add_command(command, "pack", "Write the planned kernels into one file", "");
  add_file(packs, ahead->file, "The pack to write");
  add_ahead_options(packs, ahead);
  add_command(command, "clear", "Remove all kernels that are kept; packs stay", "");
  return [=, &lists, &warms, &packs] {
    if (is_given(lists)) return list(*json);
    if (is_given(warms)) return warm(*ahead);
    if (is_given(packs)) return pack(*ahead);
    return clear();
  };
}

}  // namespace narrows::cli
