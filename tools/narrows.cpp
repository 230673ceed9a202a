// narrows: exact attention on files, from one command.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <iterator>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <narrows/narrows.hpp>

#include "core/error.hpp"
#include "tools/command_line.hpp"
#include "tools/commands.hpp"
#include "tools/files/failure.hpp"

namespace narrows::cli {
namespace {

int exit_code(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_value:
    case ErrorCode::invalid_type: return kBadValue;
    case ErrorCode::invalid_file: return kBadFile;
    case ErrorCode::not_implemented: return kNotImplemented;
    case ErrorCode::out_of_memory:
    case ErrorCode::internal: break;
  }
  return kFailed;
}

/// One line on stderr, whatever the text holds.
int report(std::string text, int code) {
  while (text.ends_with('\n')) text.pop_back();
  for (char& c : text)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = ' ';
  fmt::print(stderr, "narrows: {}\n", text);
  return code;
}

constexpr const char* kHelp =
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

int run(int count, const char* const* arguments) {
  CLI::App app("Exact attention in one pass over Q, K and V.", "narrows");
  app.set_version_flag("--version", "narrows " + std::string(version()));
  app.footer(kHelp);
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
    return report(fmt::format("{}; narrows --help tells more", error.what()), kBadValue);
  }
  for (const auto& [name, command] : commands)
    if (app.got_subcommand(name)) return command();
  return kBadValue;
}

}  // namespace
}  // namespace narrows::cli

int main(int count, char** arguments) {
  using namespace narrows;
  int code = cli::kFailed;
  try {
    code = cli::run(count, arguments);
  } catch (const Error& error) {
    code = cli::report(error.what(), cli::exit_code(error.code()));
  } catch (const std::bad_alloc&) {
    code = cli::report("out of memory", cli::kFailed);
  } catch (const std::exception& error) {
    code = cli::report(fmt::format("internal error: {}", error.what()), cli::kFailed);
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    return cli::report(fmt::format("standard output: {}", std::strerror(errno)), cli::kBadFile);
  return code;
}
