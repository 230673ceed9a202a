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

bool check() {
  const std::string value = read("NARROWS_CHECK");
  if (!value.empty() && value != "0" && value != "1") refuse_value("NARROWS_CHECK", value, "must be 0 or 1", "1");
  return value == "1";
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

std::string cache() { return read("NARROWS_CACHE"); }
std::string nvrtc() { return read("NARROWS_NVRTC"); }

std::string default_cache() {
  if (const std::string caches = read("XDG_CACHE_HOME"); caches.starts_with('/')) return caches + "/narrows";
  if (const std::string home = read("HOME"); home.starts_with('/')) return home + "/.cache/narrows";
  return "";
}

std::vector<Variable> variables() {
  return {{"NARROWS_FAMILY", read("NARROWS_FAMILY"), "force a family by name; cpu/NAME forces a CPU instruction set"},
          {"NARROWS_THREADS", read("NARROWS_THREADS"), "CPU threads, 1 to 1024; default every core"},
          {"NARROWS_CACHE", read("NARROWS_CACHE"), "folder of compiled GPU kernels, or off; default ~/.cache/narrows"},
          {"NARROWS_NVRTC", read("NARROWS_NVRTC"), "CUDA's run-time compiler: the file or its folder"},
          {"NARROWS_CHECK", read("NARROWS_CHECK"), "1: wait for each GPU call and report what it met"}};
}

}  // namespace narrows::environment
