// The commands of `narrows`, one file each. narrows.cpp is the door: exit codes, errors.
#pragma once

#include <functional>

#include "tools/command_line.hpp"

namespace narrows::cli {

enum ExitCode : int {
  kOk = 0,
  kCheckFailed = 1,     // a result or a measurement that cannot be right
  kBadValue = 2,        // of the command line, or a tensor that breaks a rule
  kBadFile = 3,         // cannot be read or written, is malformed, or lacks a tensor
  kNotImplemented = 4,  // in the contract, not in this version
  kFailed = 5,          // out of memory, internal
};

/// Adds a command to `app`; what is returned runs it after parsing and answers the exit code.
using Command = std::function<int()>;
Command add_run(CLI::App& app);
Command add_explain(CLI::App& app);
Command add_info(CLI::App& app);
Command add_bench(CLI::App& app);
Command add_cache(CLI::App& app);

/// The whole command line; answers the exit code. Throws Error for what cannot be parsed.
int run_command(int count, const char* const* arguments);

}  // namespace narrows::cli
