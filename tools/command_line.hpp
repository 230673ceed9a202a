// What commands need of the parser of command lines; command_line.cpp alone (and commands.cpp) sees the library behind it.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace narrows::cli {

/// A command named `name`. `examples` stand at the end of its help.
CLI::App& add_command(CLI::App& app, const std::string& name, const std::string& description,
                      const std::string& examples);
/// One of the commands of `command` must be given.
void require_command(CLI::App& command);
bool is_given(const CLI::App& command);

/// How an option looks in the help.
struct OptionText {
  std::string type;  // of its value
  std::string help;
  std::string group = "Options";
};

/// An option of one value; giving it twice is an error. set(option, text) gets its name as errors should give it.
using SetOption = std::function<void(const std::string& option, const std::string& text)>;
void add_option(CLI::App& command, const std::string& name, const OptionText& text, SetOption set);
void add_repeatable_option(CLI::App& command, const std::string& name, const OptionText& text, SetOption set);
void add_flag(CLI::App& command, const std::string& name, bool& flag, const OptionText& text);
void add_files(CLI::App& command, std::vector<std::string>& paths, const std::string& help, bool required);
void add_file(CLI::App& command, std::string& path, const std::string& help);

/// Long options with underscores get dashes, and "--causal top_left" its "=": the forms that the parser knows.
std::vector<std::string> normalised(int count, const char* const* arguments);

}  // namespace narrows::cli
