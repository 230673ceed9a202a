#include "tools/command_line.hpp"

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include <CLI/CLI.hpp>

namespace narrows::cli {

CLI::App& add_command(CLI::App& app, const std::string& name, const std::string& description,
                      const std::string& examples) {
  CLI::App& command = *app.add_subcommand(name, description);
  command.footer(examples);
  return command;
}

void require_command(CLI::App& command) { command.require_subcommand(1); }

bool is_given(const CLI::App& command) { return command.parsed(); }

void add_option(CLI::App& command, const std::string& name, const OptionText& text, SetOption set) {
  const std::string called = name.substr(name.rfind(',') + 1);
  command
      .add_option_function<std::string>(
          name, [called, set = std::move(set)](const std::string& value) { set(called, value); }, text.help)
      ->type_name(text.type)
      ->group(text.group);
}

void add_repeatable_option(CLI::App& command, const std::string& name, const OptionText& text, SetOption set) {
  command
      .add_option_function<std::vector<std::string>>(
          name,
          [name, set = std::move(set)](const std::vector<std::string>& values) {
            for (const std::string& value : values) set(name, value);
          },
          text.help)
      ->type_name(text.type)
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->group(text.group);
}

void add_flag(CLI::App& command, const std::string& name, bool& flag, const OptionText& text) {
  command.add_flag(name, flag, text.help)->group(text.group);
}

void add_files(CLI::App& command, std::vector<std::string>& paths, const std::string& help, bool required) {
  command.add_option("FILE", paths, help)->required(required);
}

void add_file(CLI::App& command, std::string& path, const std::string& help) {
  command.add_option("FILE", path, help)->required();
}

std::vector<std::string> normalised(int count, const char* const* arguments) {
  constexpr std::array<std::string_view, 5> kTypes{"bottom_right", "top_left", "none", "true", "false"};
  std::vector<std::string> result(arguments + std::min(count, 1), arguments + count);
  for (auto at = result.begin(); at != result.end() && *at != "--"; ++at) {
    if (!at->starts_with("--")) continue;
    std::replace(at->begin(), std::find(at->begin(), at->end(), '='), '_', '-');
    if (*at != "--causal") continue;
    const auto next = at + 1;
    const bool typed = next != result.end() && std::find(kTypes.begin(), kTypes.end(), *next) != kTypes.end();
    *at += "=" + (typed ? *next : std::string("bottom_right"));
    if (typed) result.erase(next);
  }
  return result;
}

}  // namespace narrows::cli
