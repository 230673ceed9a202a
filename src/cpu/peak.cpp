#include "cpu/peak.hpp"

#include "core/error.hpp"
#include "cpu/peak_loops.hpp"
#include "cpu/tile_kernels.hpp"

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include <unistd.h>

namespace narrows::cpu {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kWindow{10};

struct Span {
  Clock::time_point begin, end;
  double units = 0;
};

/// Units a second in the best of some windows of time, in each of which every thread works from the same moment on.
/// chunk(thread) does a small piece of work, tens of microseconds, and returns its units.
double best_rate(int threads, int windows, const std::function<void(int)>& prepare,
                 const std::function<double(int)>& chunk) {
  std::vector<std::vector<Span>> spans(static_cast<std::size_t>(windows),
                                       std::vector<Span>(static_cast<std::size_t>(threads)));
  std::barrier start(threads);
  const auto body = [&](int thread) {
    prepare(thread);
    for (std::vector<Span>& window : spans) {
      start.arrive_and_wait();
      Span span{Clock::now(), {}, 0};
      do {
        span.units += chunk(thread);
        span.end = Clock::now();
      } while (span.end - span.begin < kWindow);
      window[static_cast<std::size_t>(thread)] = span;
    }
  };
  {
    std::vector<std::jthread> workers;
    try {
      for (int thread = 1; thread < threads; ++thread) workers.emplace_back(body, thread);
    } catch (const std::system_error&) {  // the system gives no more: measure with those that there are
      for (std::size_t missing = workers.size() + 1; missing < static_cast<std::size_t>(threads); ++missing)
        start.arrive_and_drop();
      for (std::vector<Span>& window : spans) window.resize(workers.size() + 1);
    }
    body(0);
  }
  double best = 0;
  for (const std::vector<Span>& window : spans) {
    Span whole = window.front();
    for (const Span& span : std::span(window).subspan(1)) {
      whole.begin = std::min(whole.begin, span.begin);
      whole.end = std::max(whole.end, span.end);
      whole.units += span.units;
    }
    best = std::max(best, whole.units / std::chrono::duration<double>(whole.end - whole.begin).count());
  }
  return best;
}

const PeakLoop& loop_of(std::string_view instruction_set) {
  for (const TileKernels<float>* kernels : available_tile_kernels<float>()) {
    if (kernels->name != instruction_set) continue;
#if defined(__x86_64__)
    if (instruction_set == "avx512") return kPeakLoopAvx512;
    if (instruction_set == "avx2") return kPeakLoopAvx2;
#endif
    return kPeakLoopPortable;
  }
  refuse_value("instruction set", instruction_set, "this CPU cannot execute it", "portable");
}

/// Twice the last cache within bounds: systems report none, or the sum of caches of which a core reaches one, and touching
/// pages for the first time takes longer than reading them.
std::size_t uncached_bytes() {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  long cache = 0;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  cache = ::sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
  return std::clamp(2 * static_cast<std::size_t>(std::max(cache, 0L)), 64 * kMiB, 128 * kMiB);
}

std::uint64_t read(const std::uint64_t* words, std::size_t count) {
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum ^= words[i];
  return sum;
}

}  // namespace

double fma_rate(std::string_view instruction_set, int threads) {
  constexpr long kRounds = 4096;
  constexpr int kWindows = 5;
  const PeakLoop& loop = loop_of(instruction_set);
  return best_rate(
      threads, kWindows, [](int) {},
      [&](int) {
        volatile float result = loop.run(kRounds);
        static_cast<void>(result);
        return loop.flops_per_round * kRounds;
      });
}

double read_rate(int threads) { return read_rate(threads, uncached_bytes()); }

double read_rate(int threads, std::size_t bytes) {
  constexpr std::size_t kLargestChunk = std::size_t{1} << 17;  // words: 1 MiB
  constexpr int kWindows = 3;
  struct Slice {
    std::unique_ptr<std::uint64_t[]> words;
    std::size_t next = 0;
  };
  const auto count = static_cast<std::size_t>(threads);
  const std::size_t words = std::max<std::size_t>(bytes / sizeof(std::uint64_t) / count, 1);
  const std::size_t chunk = std::min(words, kLargestChunk), chunks = words / chunk;
  const std::size_t passes = kLargestChunk / chunk;  // so that looking at the clock costs little
  std::vector<Slice> slices(count);
  for (Slice& slice : slices) slice.words.reset(new std::uint64_t[chunks * chunk]);
  const auto touch = [&](int thread) {
    std::memset(slices[static_cast<std::size_t>(thread)].words.get(), 1, chunks * chunk * sizeof(std::uint64_t));
  };
  return best_rate(threads, kWindows, touch, [&](int thread) {
    Slice& slice = slices[static_cast<std::size_t>(thread)];
    for (std::size_t pass = 0; pass < passes; ++pass) {
      volatile std::uint64_t result = read(slice.words.get() + slice.next * chunk, chunk);
      static_cast<void>(result);
    }
    slice.next = (slice.next + 1) % chunks;
    return static_cast<double>(passes * chunk * sizeof(std::uint64_t));
  });
}

Machine measured(Machine machine) {
  struct Rates {
    double flops, bytes;
  };
  static std::mutex mutex;
  static std::map<std::pair<std::string, int>, Rates> known;
  const std::lock_guard lock(mutex);
  const std::string set(machine.instruction_sets.front());
  auto found = known.find({set, machine.threads});
  if (found == known.end()) {
    const Rates rates{fma_rate(set, machine.threads), read_rate(machine.threads)};
    found = known.insert({{set, machine.threads}, rates}).first;
  }
  machine.flops_per_second = found->second.flops;
  machine.bytes_per_second = found->second.bytes;
  return machine;
}

}  // namespace narrows::cpu
