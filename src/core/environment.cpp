#include "core/environment.hpp"

#include "core/error.hpp"

#include <charconv>
#include <cstdlib>

namespace narrows::environment {
namespace {

std::string read(const char* variable) {
  const char* value = std::getenv(variable);
  return value ? value : "";
}

}  // namespace

std::string family() {
  const std::string value = read("NARROWS_FAMILY");
  return value.substr(0, value.find('/'));
}

std::string instruction_set() {
  const std::string value = read("NARROWS_FAMILY");
  const std::size_t slash = value.find('/');
  return slash == std::string::npos ? "" : value.substr(slash + 1);
}

int threads() {
  const std::string value = read("NARROWS_THREADS");
  if (value.empty()) return 0;
  int count = 0;
  const auto [end, failure] = std::from_chars(value.data(), value.data() + value.size(), count);
  if (failure != std::errc{} || end != value.data() + value.size() || count < 1 || count > 1024)
    refuse_value("NARROWS_THREADS", value, "a whole number from 1 to 1024", count > 1024 ? "1024" : "1");
  return count;
}

std::vector<Variable> variables() {
  return {{"NARROWS_FAMILY", read("NARROWS_FAMILY"), "force a family by name; cpu/NAME forces a CPU instruction set"},
          {"NARROWS_THREADS", read("NARROWS_THREADS"), "CPU threads, 1 to 1024; default every core"}};
}

}  // namespace narrows::environment
