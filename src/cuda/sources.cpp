#include "cuda/sources.hpp"

#include "core/error.hpp"

#include <algorithm>

namespace narrows::cuda {
namespace {

constexpr std::string_view kConfig = "config.cuh";

/// What `text` includes: a directive in a comment counts too, which costs a file that is not needed.
std::vector<std::string_view> includes(std::string_view text) {
  std::vector<std::string_view> names;
  constexpr std::string_view kBlank = " \t";
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find('\n', at), text.size());
    std::string_view line = text.substr(at, end - at);
    at = end + 1;
    const auto take = [&](std::string_view word) {
      line.remove_prefix(std::min(line.find_first_not_of(kBlank), line.size()));
      if (!line.starts_with(word)) return false;
      line.remove_prefix(word.size());
      return true;
    };
    if (!take("#") || !take("include") || !(take("\"") || take("<"))) continue;
    names.push_back(line.substr(0, line.find_first_of("\">")));
  }
  return names;
}

}  // namespace

std::vector<SourceFile> included_sources(const Program& program, std::span<const SourceFile> sources) {
  const auto find = [&](std::string_view name) {
    return std::find_if(sources.begin(), sources.end(), [&](const SourceFile& file) { return file.name == name; });
  };
  const std::string first = "kernels/" + std::string(program.source);
  if (find(first) == sources.end())
    throw Error(ErrorCode::internal, text("cuda: ", first, " is not among the kernels' sources"));
  std::vector<SourceFile> reached{*find(first)};
  for (std::size_t next = 0; next < reached.size(); ++next)
    for (const std::string_view name : includes(reached[next].text)) {
      const bool known =
          std::any_of(reached.begin(), reached.end(), [&](const SourceFile& file) { return file.name == name; });
      if (known) continue;
      if (name == kConfig)
        reached.push_back({kConfig, program.config});
      else if (const auto file = find(name); file != sources.end())
        reached.push_back(*file);
    }
  return reached;
}

}  // namespace narrows::cuda
