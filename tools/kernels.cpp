#include "tools/kernels.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

#include "cuda/driver.hpp"
#include "cuda/planned.hpp"

namespace narrows::cli {

namespace {

/// Without rules, of aligned rows of up to 256 columns: its constants say so. Of the backward and the decode kernels those
/// of one dtype and width.
bool is_plain(const Program& program) {
  const std::string& config = program.config;
  if (!program.function.starts_with("forward"))
    for (const std::string_view constant : {"kElement = Element::bf16;", "kHeadDim = 128;"})
      if (config.find(constant) == std::string::npos) return false;
  for (const std::string_view rule : {"kNatural", "kMask", "kDropout", "kDeterministic"})
    if (config.find(text(rule, " = true;")) != std::string::npos) return false;
  return config.find("kCopyBytes = 16;") != std::string::npos && config.find("kHeadDim = 576;") == std::string::npos;
}

bool is_of(const Program& program, DType dtype) {
  return program.config.find(text("kElement = Element::", name(dtype), ";")) != std::string::npos;
}

}  // namespace

std::vector<Wanted> planned(const std::vector<std::string>& architectures, bool plain,
                            const std::vector<DType>& dtypes) {
  std::vector<Wanted> wanted;
  for (const std::string& architecture : architectures)
    for (Program& program : cuda::planned_programs(architecture)) {
      const auto is_of_program = [&](DType dtype) { return is_of(program, dtype); };
      const bool is_of_these = dtypes.empty() || std::any_of(dtypes.begin(), dtypes.end(), is_of_program);
      if (is_of_these && (!plain || is_plain(program))) wanted.push_back({std::move(program), architecture});
    }
  return wanted;
}

std::vector<Wanted> part_of(std::vector<Wanted> whole, std::int64_t part, std::int64_t parts) {
  std::int64_t number = 0;
  std::erase_if(whole, [&](const Wanted&) { return number++ % parts != part - 1; });
  return whole;
}

std::vector<std::string> own_architectures() {
  cuda::driver();
  std::vector<std::string> names;
  for (int device = 0; device < cuda::find_driver().devices; ++device) {
    const cuda::DeviceFacts& facts = cuda::device_facts(device);
    const std::string name = cuda::architecture(facts.major, facts.minor);
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

std::vector<cuda::PackEntry> fetch(cuda::Cache& cache, std::span<const Wanted> wanted, int threads) {
  std::vector<cuda::PackEntry> entries(wanted.size());
  std::atomic<std::size_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    for (std::size_t i = next++; i < wanted.size(); i = next++) {
      try {
        const auto binary = cache.get(wanted[i].program, wanted[i].architecture);
        entries[i] = {cache.key(wanted[i].program, wanted[i].architecture), *binary};
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!failure) failure = std::current_exception();
        next = wanted.size();
      }
    }
  };
  std::vector<std::jthread> workers;
  for (int i = 1; i < threads; ++i) workers.emplace_back(work);
  work();
  workers.clear();  // joins
  if (failure) std::rethrow_exception(failure);
  return entries;
}

}  // namespace narrows::cli
