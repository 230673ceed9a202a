#include "tools/commands.hpp"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <narrows/narrows.hpp>

#include "core/error.hpp"
#include "tools/files/failure.hpp"

namespace narrows::cli {
namespace {

constexpr const char* kCommandHelp =
    "One call is attention of q (b, sq, h, d) on k (b, sk, hk, d) and v (b, sk, hk, dv): o = softmax(scale q k^T) "
    "v.\n\n"
    "  narrows run examples/minilm/minilm-layers.safetensors --check\n"
    "  narrows run examples/minilm/minilm-layers.safetensors --backward --check\n"
    "  narrows explain --h 16 --sq 4096 --d 64 --causal\n"
    "  narrows info\n"
    "  narrows bench --sq 1024 --json\n"
    "  narrows cache list\n\n"
    "Exit codes: 0 done; 1 a check failed; 2 a bad option, or a tensor that breaks a rule; 3 a file cannot be read or\n"
    "written, is malformed, or lacks a tensor; 4 not implemented in this version; 5 out of memory, or an internal "
    "error.\n"
    "Every error is one line on stderr. docs/cli.md tells more.";

}  // namespace

int run_command(int count, const char* const* arguments) {
  CLI::App app("Exact attention in one pass over Q, K and V.", "narrows");
  app.set_version_flag("--version", "narrows " + std::string(version()));
  app.footer(kCommandHelp);
  app.require_subcommand(1);
  const std::pair<const char*, Command> commands[] = {{"run", add_run(app)},
                                                      {"explain", add_explain(app)},
                                                      {"info", add_info(app)},
                                                      {"bench", add_bench(app)},
                                                      {"cache", add_cache(app)}};
  std::vector<std::string> words = normalised(count, arguments);
  const auto known = [&](const auto& entry) { return words.front() == entry.first; };
  if (!words.empty() && !words.front().starts_with('-') &&
      std::none_of(std::begin(commands), std::end(commands), known))
    refuse_value("command", files::printable(words.front()), "must be run, explain, info, bench or cache");
  std::reverse(words.begin(), words.end());  // as the parser takes them
  try {
    app.parse(words);
  } catch (const CLI::Success& asked) {  // --help, --version
    return app.exit(asked);
  } catch (const CLI::ParseError& error) {
    throw Error(ErrorCode::invalid_value, fmt::format("{}; narrows --help tells more", error.what()));
  }
  for (const auto& [name, command] : commands)
    if (app.got_subcommand(name)) return command();
  return kBadValue;
}

}  // namespace narrows::cli
