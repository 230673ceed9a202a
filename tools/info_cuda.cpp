#include "tools/info_cuda.hpp"

#include <cstdint>
#include <filesystem>
#include <vector>

#include <fmt/format.h>

#include "cuda/disk.hpp"
#include "cuda/driver.hpp"
#include "cuda/nvrtc.hpp"
#include "tools/files/failure.hpp"
#include "tools/text.hpp"

namespace narrows::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Kept {
  std::string folder;
  std::string detail;  // why nothing is kept there; empty: it is
  std::int64_t kernels = 0, bytes = 0;
};

/// Looks, and makes no folder.
Kept kept() {
  const cuda::DiskCache::Settings settings = cuda::disk_settings();
  if (settings.folder.empty()) return {"", settings.reason.empty() ? "off" : settings.reason};
  Kept found{settings.folder, ""};
  if (std::error_code failure; !std::filesystem::exists(settings.folder, failure)) return found;
  std::string reason;
  const cuda::PrivateFolder folder(settings.folder, reason);
  found.detail = reason;
  for (const cuda::PrivateFolder::Entry& entry :
       folder ? folder.entries() : std::vector<cuda::PrivateFolder::Entry>()) {
    if (!cuda::is_kernel(entry.name)) continue;
    ++found.kernels;
    found.bytes += entry.bytes;
  }
  return found;
}

std::string in_words(const cuda::DeviceFacts& facts) {
  return fmt::format("cuda:{} {}, compute capability {}.{}, {} multiprocessors of {:.0f} MHz, {} of memory at {}/s",
                     facts.ordinal, facts.name, facts.major, facts.minor, facts.multiprocessors,
                     facts.clock_hertz / 1e6, with_prefix(static_cast<double>(facts.memory_bytes), "B"),
                     with_prefix(facts.bytes_per_second, "B"));
}

}  // namespace

Json cuda_json() {
  const cuda::Driver& driver = cuda::find_driver();
  const cuda::FoundCompiler compiler = cuda::find_compiler();
  const Kept cache = kept();
  Json devices = Json::array();
  for (int device = 0; device < driver.devices; ++device) {
    const cuda::DeviceFacts& facts = cuda::device_facts(device);
    devices.push_back({{"name", facts.name},
                       {"compute_capability", fmt::format("{}.{}", facts.major, facts.minor)},
                       {"multiprocessors", facts.multiprocessors},
                       {"shared_bytes", facts.shared_bytes},
                       {"l2_bytes", facts.l2_bytes},
                       {"memory_bytes", facts.memory_bytes},
                       {"clock_hertz", facts.clock_hertz},
                       {"bytes_per_second", facts.bytes_per_second}});
  }
  return {{"driver", driver.version ? cuda::version_text(driver.version) : ""},
          {"detail", driver.absence},
          {"devices", devices},
          {"nvrtc",
           {{"path", compiler.path},
            {"version", compiler.path.empty() ? "" : compiler.version.text()},
            {"detail", compiler.absence}}},
          {"cache",
           {{"folder", cache.folder}, {"kernels", cache.kernels}, {"bytes", cache.bytes}, {"detail", cache.detail}}}};
}

std::string cuda_text() {
  const cuda::Driver& driver = cuda::find_driver();
  const auto line = [](std::string_view label, const std::string& text) {
    return fmt::format("{:<18}{}\n", label, text);
  };
  std::string lines;
  if (driver.functions)
    lines += line("cuda", "driver of CUDA " + cuda::version_text(driver.version));
  else
    lines += line("cuda", "not available: " + driver.absence);
  for (int device = 0; device < driver.devices; ++device) lines += line("", in_words(cuda::device_facts(device)));
  const cuda::FoundCompiler compiler = cuda::find_compiler();
  if (compiler.path.empty())
    lines += line("kernel compiler", "not available: " + compiler.absence);
  else
    lines +=
        line("kernel compiler", fmt::format("NVRTC {}, {}", compiler.version.text(), files::printable(compiler.path)));
  const Kept cache = kept();
  if (!cache.detail.empty())
    lines += line("kernel cache",
                  fmt::format("not available: {}{}{}", cache.folder, cache.folder.empty() ? "" : ": ", cache.detail));
  else
    lines += line("kernel cache", fmt::format("{} kernels, {} in {}", cache.kernels,
                                              with_prefix(static_cast<double>(cache.bytes), "B"), cache.folder));
  return lines;
}

}  // namespace narrows::cli
