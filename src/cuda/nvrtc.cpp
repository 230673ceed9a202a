#include "cuda/nvrtc.hpp"

#include "core/environment.hpp"
#include "core/error.hpp"
#include "cuda/driver.hpp"
#include "cuda/library.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>

namespace narrows::cuda {
namespace {

namespace fs = std::filesystem;

constexpr int kOldestMajor = 12;
constexpr int kNewestMajor = 19;  // that a name is tried for

std::string file_name(int major) { return "libnvrtc.so." + std::to_string(major); }

std::optional<CompilerVersion> parse_version(std::string_view text) {
  CompilerVersion version;
  const char* const end = text.data() + text.size();
  const auto [dot, failure] = std::from_chars(text.data(), end, version.major);
  if (failure != std::errc{} || dot == end || *dot != '.') return {};
  const auto [rest, second] = std::from_chars(dot + 1, end, version.minor);
  if (second != std::errc{} || rest != end) return {};
  return version;
}

/// The version by the name of the library that NVRTC brings its built-in functions in, where one alone lies beside it.
std::optional<CompilerVersion> version_beside(const fs::path& file, std::optional<int> major) {
  constexpr std::string_view kPrefix = "libnvrtc-builtins.so.";
  std::optional<CompilerVersion> found;
  std::error_code failure;
  for (fs::directory_iterator entry(file.parent_path(), failure), end; !failure && entry != end;
       entry.increment(failure)) {
    const std::string name = entry->path().filename().string();
    if (!name.starts_with(kPrefix)) continue;
    const auto version = parse_version(std::string_view(name).substr(kPrefix.size()));
    if (!version || (major && version->major != *major)) continue;
    if (found && *found != *version) return {};
    found = version;
  }
  return found;
}

std::optional<CompilerVersion> version_inside(const std::string& path, std::string& reason) {
  const Library library(path, reason);
  NvrtcFunctions functions{};
  CompilerVersion version;
  if (!library) return {};
  if (!library.find("nvrtcVersion", functions.nvrtcVersion) ||
      functions.nvrtcVersion(&version.major, &version.minor) != 0) {
    reason = path + ": is not NVRTC";
    return {};
  }
  return version;
}

FoundCompiler candidate(const std::string& path, std::optional<int> major) {
  FoundCompiler found;
  std::optional<CompilerVersion> version;
  if (path.find('/') != std::string::npos) {
    if (std::error_code failure; !fs::exists(path, failure)) return {{}, {}, path + ": no such file or folder"};
    version = version_beside(path, major);
  }
  if (!version) version = version_inside(path, found.absence);
  if (!version) return found;
  return {path, *version, {}};
}

bool is_too_new(CompilerVersion version, int driver_version) {
  return driver_version != 0 && version.major > driver_version / 1000;
}

std::string too_new(const FoundCompiler& found, int driver_version) {
  return text("NVRTC ", found.version.text(), " (", found.path, ") needs a driver of CUDA ", found.version.major,
              "; this machine's is of CUDA ", version_text(driver_version));
}

FoundCompiler chosen_file(const std::string& path, int driver_version) {
  FoundCompiler found = candidate(path, {});
  if (found.path.empty()) return {{}, {}, "NARROWS_NVRTC: " + found.absence};
  if (is_too_new(found.version, driver_version)) return {{}, {}, "NARROWS_NVRTC: " + too_new(found, driver_version)};
  return found;
}

std::vector<std::string> candidates(const CompilerPlaces& places, int major) {
  std::vector<std::string> paths;
  for (const std::string& folder : places.folders) {
    std::string path = folder + "/" + file_name(major);
    if (std::error_code failure; fs::exists(path, failure)) paths.push_back(std::move(path));
  }
  if (places.by_name) paths.push_back(file_name(major));
  return paths;
}

/// Toolkits where they are installed by default, the newest first.
std::vector<std::string> toolkit_folders() {
  std::vector<std::pair<std::pair<int, int>, std::string>> numbered;
  std::error_code failure;
  for (fs::directory_iterator entry("/usr/local", failure), end; !failure && entry != end; entry.increment(failure)) {
    const std::string name = entry->path().filename().string();
    if (!name.starts_with("cuda-")) continue;
    const auto version = parse_version(std::string_view(name).substr(5));
    if (version) numbered.push_back({{version->major, version->minor}, entry->path().string() + "/lib64"});
  }
  std::sort(numbered.rbegin(), numbered.rend());
  std::vector<std::string> folders{"/usr/local/cuda/lib64"};
  for (const auto& [version, folder] : numbered) folders.push_back(folder);
  return folders;
}

std::mutex compilers_mutex;
std::vector<std::string> more_folders;

CompilerPlaces places_here() {
  CompilerPlaces places{environment::nvrtc(), {}, true};
  {
    const std::lock_guard lock(compilers_mutex);
    places.folders = more_folders;
  }
  if (const std::string own = own_folder(); !own.empty())
    for (const char* package : {"cu13", "cuda_nvrtc"}) places.folders.push_back(own + "/../nvidia/" + package + "/lib");
  for (std::string& folder : toolkit_folders()) places.folders.push_back(std::move(folder));
  return places;
}

std::unique_ptr<Compiler> load(const std::string& path) {
  std::string reason;
  const Library library(path, reason);
  if (!library) throw Error(ErrorCode::not_implemented, "cuda: " + reason);
  auto compiler = std::make_unique<Compiler>();
  NvrtcFunctions& f = compiler->functions;
  const bool complete =
      library.find("nvrtcVersion", f.nvrtcVersion) && library.find("nvrtcGetErrorString", f.nvrtcGetErrorString) &&
      library.find("nvrtcGetNumSupportedArchs", f.nvrtcGetNumSupportedArchs) &&
      library.find("nvrtcGetSupportedArchs", f.nvrtcGetSupportedArchs) &&
      library.find("nvrtcCreateProgram", f.nvrtcCreateProgram) &&
      library.find("nvrtcDestroyProgram", f.nvrtcDestroyProgram) &&
      library.find("nvrtcCompileProgram", f.nvrtcCompileProgram) &&
      library.find("nvrtcGetProgramLogSize", f.nvrtcGetProgramLogSize) &&
      library.find("nvrtcGetProgramLog", f.nvrtcGetProgramLog) &&
      library.find("nvrtcGetCUBINSize", f.nvrtcGetCUBINSize) && library.find("nvrtcGetCUBIN", f.nvrtcGetCUBIN) &&
      library.find("nvrtcGetPTXSize", f.nvrtcGetPTXSize) && library.find("nvrtcGetPTX", f.nvrtcGetPTX);
  int count = 0;
  if (!complete || f.nvrtcVersion(&compiler->version.major, &compiler->version.minor) != 0 ||
      f.nvrtcGetNumSupportedArchs(&count) != 0)
    throw Error(ErrorCode::not_implemented, text("cuda: ", path, ": is not an NVRTC of CUDA 12 or later"));
  compiler->architectures.resize(static_cast<std::size_t>(count));
  f.nvrtcGetSupportedArchs(compiler->architectures.data());
  std::sort(compiler->architectures.begin(), compiler->architectures.end());
  compiler->path = path;
  return compiler;
}

}  // namespace

std::string CompilerVersion::text() const { return narrows::text(major, ".", minor); }

FoundCompiler find_compiler(const CompilerPlaces& places, int driver_version) {
  CompilerPlaces where = places;
  if (!places.chosen.empty()) {
    if (std::error_code failure; !fs::is_directory(places.chosen, failure))
      return chosen_file(places.chosen, driver_version);
    where = {{}, {places.chosen}, false};
  }
  const int limit = driver_version == 0 ? kNewestMajor : driver_version / 1000;
  for (int major = limit; major >= kOldestMajor; --major)
    for (const std::string& path : candidates(where, major))
      if (FoundCompiler found = candidate(path, major); !found.path.empty()) return found;
  std::string unfit;
  for (int major = limit + 1; major <= kNewestMajor && unfit.empty(); ++major)
    for (const std::string& path : candidates(where, major))
      if (const FoundCompiler found = candidate(path, major); !found.path.empty())
        unfit = too_new(found, driver_version);
  if (unfit.empty()) unfit = text("NVRTC (", file_name(std::min(limit, 13)), "): not found");
  return {{}, {}, places.chosen.empty() ? unfit : text("NARROWS_NVRTC: ", places.chosen, ": ", unfit)};
}

FoundCompiler find_compiler() { return find_compiler(places_here(), find_driver().version); }

void add_compiler_folders(const std::vector<std::string>& folders) {
  const std::lock_guard lock(compilers_mutex);
  more_folders.insert(more_folders.end(), folders.begin(), folders.end());
}

const Compiler& open_compiler(const FoundCompiler& found) {
  if (found.path.empty()) throw Error(ErrorCode::not_implemented, "cuda: " + found.absence);
  static auto& opened = *new std::map<std::string, std::unique_ptr<Compiler>>;
  const std::lock_guard lock(compilers_mutex);
  std::unique_ptr<Compiler>& compiler = opened[found.path];
  if (!compiler) compiler = load(found.path);
  if (compiler->version != found.version)
    throw Error(ErrorCode::internal, text("cuda: ", found.path, ": is version ", compiler->version.text(),
                                          ", but what lies beside it is of ", found.version.text()));
  return *compiler;
}

}  // namespace narrows::cuda
