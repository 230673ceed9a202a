#include "cpu/peak.hpp"

#include "core/error.hpp"
#include "cpu/features.hpp"
#include "cpu/machine.hpp"
#include "cpu/peak_loops.hpp"

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
#include <utility>
#include <vector>

namespace narrows::cpu {
namespace {

using Clock = std::chrono::steady_clock;

struct Span {
  Clock::time_point begin, end;
  double units = 0;
};

/// Units a second in the best of some windows of time, in each of which every thread works from the same moment on.
/// chunk(thread) does a small piece of work, tens of microseconds, and returns its units.
double best_rate(int threads, std::chrono::milliseconds window_time, int windows,
                 const std::function<void(int)>& prepare, const std::function<double(int)>& chunk) {
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
      } while (span.end - span.begin < window_time);
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

struct Loops {
  std::string_view instruction_set;
  bool executable;
  const PeakLoop* single;  // fp32 multiply-adds
  const PeakLoop* bf16;    // the same where there are no dot products of bf16
  ReadLoop read;
};

/// Best first.
std::vector<Loops> all_loops() {
  return {
#if defined(__x86_64__)
    {"amx", features().amx, &kPeakLoopAvx512, &kPeakLoopAmx, kReadLoopAvx512},
        {"avx512bf16", features().avx512bf16, &kPeakLoopAvx512, &kPeakLoopAvx512Bf16, kReadLoopAvx512},
        {"avx512", features().avx512, &kPeakLoopAvx512, &kPeakLoopAvx512, kReadLoopAvx512},
        {"avx2", features().avx2, &kPeakLoopAvx2, &kPeakLoopAvx2, kReadLoopAvx2},
#elif defined(__aarch64__)
    {"neon", true, &kPeakLoopNeon, &kPeakLoopNeon, kReadLoopNeon},
#endif
        {"portable", true, &kPeakLoopPortable, &kPeakLoopPortable, kReadLoopPortable},
  };
}

const PeakLoop& loop_of(std::string_view instruction_set, DType dtype) {
  if (dtype != DType::fp32 && dtype != DType::fp16 && dtype != DType::bf16)
    refuse_type("dtype", name(dtype), "has no peak loop; must be fp32, fp16 or bf16", "fp32");
  for (const Loops& loops : all_loops())
    if (loops.executable && loops.instruction_set == instruction_set)
      return dtype == DType::bf16 ? *loops.bf16 : *loops.single;
  refuse_value("instruction set", instruction_set, "this CPU cannot execute it", "portable");
}

ReadLoop widest_read() {
  const std::vector<Loops> all = all_loops();
  return std::find_if(all.begin(), all.end(), [](const Loops& loops) { return loops.executable; })->read;
}

/// Twice the last cache within bounds: systems report none, or the sum of caches of which a core reaches one, and touching
/// pages for the first time takes longer than reading them.
std::size_t uncached_bytes() {
  constexpr std::size_t kMiB = std::size_t{1} << 20;
  return std::clamp(2 * static_cast<std::size_t>(cache_bytes(3)), 64 * kMiB, 128 * kMiB);
}

}  // namespace

double peak_rate(std::string_view instruction_set, DType dtype, int threads) {
  constexpr long kRounds = 4096;
  constexpr std::chrono::milliseconds kWindow{3};  // short enough to be left alone in beside other processes
  constexpr int kWindows = 16;
  const PeakLoop& loop = loop_of(instruction_set, dtype);
  return best_rate(
      threads, kWindow, kWindows, [](int) {},
      [&](int) {
        volatile float result = loop.run(kRounds);
        static_cast<void>(result);
        return loop.flops_per_round * kRounds;
      });
}

double read_rate(int threads) { return read_rate(threads, uncached_bytes()); }

double read_rate(int threads, std::size_t bytes) {
  constexpr std::size_t kBlock = kReadBlock, kLargestChunk = std::size_t{1} << 11;  // blocks: 1 MiB
  constexpr std::chrono::milliseconds kWindow{10};
  constexpr int kWindows = 3;
  struct alignas(kBlock) Block {
    std::byte bytes[kBlock];
  };
  struct Slice {
    std::unique_ptr<Block[]> blocks;
    std::size_t next = 0;
  };
  const auto count = static_cast<std::size_t>(threads);
  const std::size_t blocks = std::max<std::size_t>(bytes / kBlock / count, 1);
  const std::size_t chunk = std::min(blocks, kLargestChunk), chunks = blocks / chunk;
  const std::size_t passes = kLargestChunk / chunk;  // so that looking at the clock costs little
  const ReadLoop read = widest_read();
  std::vector<Slice> slices(count);
  for (Slice& slice : slices) slice.blocks.reset(new Block[chunks * chunk]);
  const auto touch = [&](int thread) {
    std::memset(slices[static_cast<std::size_t>(thread)].blocks.get(), 1, chunks * chunk * kBlock);
  };
  return best_rate(threads, kWindow, kWindows, touch, [&](int thread) {
    Slice& slice = slices[static_cast<std::size_t>(thread)];
    for (std::size_t pass = 0; pass < passes; ++pass) {
      volatile unsigned long long result = read(slice.blocks.get() + slice.next * chunk, static_cast<long>(chunk));
      static_cast<void>(result);
    }
    slice.next = (slice.next + 1) % chunks;
    return static_cast<double>(passes * chunk * kBlock);
  });
}

Machine measured(Machine machine) {
  struct Rates {
    double flops, bf16_flops, bytes;
  };
  static std::mutex mutex;
  static std::map<std::pair<std::string, int>, Rates> known;
  const std::lock_guard lock(mutex);
  const std::string set(machine.instruction_sets.front());
  auto found = known.find({set, machine.threads});
  if (found == known.end()) {
    const double flops = peak_rate(set, DType::fp32, machine.threads);
    const bool same = &loop_of(set, DType::bf16) == &loop_of(set, DType::fp32);
    const double bf16_flops = same ? flops : peak_rate(set, DType::bf16, machine.threads);
    const Rates rates{flops, bf16_flops, read_rate(machine.threads)};
    found = known.insert({{set, machine.threads}, rates}).first;
  }
  machine.flops_per_second = found->second.flops;
  machine.bf16_flops_per_second = found->second.bf16_flops;
  machine.bytes_per_second = found->second.bytes;
  return machine;
}

}  // namespace narrows::cpu
