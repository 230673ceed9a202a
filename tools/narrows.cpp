// narrows: exact attention on files, from one command.
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include <fmt/format.h>

#include "core/error.hpp"
#include "tools/commands.hpp"

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

}  // namespace
}  // namespace narrows::cli

int main(int count, char** arguments) {
  using namespace narrows;
  int code = cli::kFailed;
  try {
    code = cli::run_command(count, arguments);
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
