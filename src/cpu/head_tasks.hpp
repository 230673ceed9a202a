// Heads, each worked on in stages, by threads that keep to a head while there is work: what a thread packs it reads again while
// its own caches hold it, and no barrier stands between the stages of different heads.
#pragma once

#include "core/types.hpp"
#include "cpu/pool.hpp"
#include "plan/scratch.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <span>
#include <thread>

namespace narrows::cpu {

/// How far a head is. Its tasks of a stage begin when all of the stage before are done.
template <std::size_t Stages> class HeadProgress {
 public:
  explicit HeadProgress(const std::array<i64, Stages>& counts) : counts_(counts) {}

  /// The next task of the stage, or -1.
  i64 claim(std::size_t stage) {
    if (next_[stage].load(std::memory_order_relaxed) >= counts_[stage]) return -1;
    const i64 task = next_[stage].fetch_add(1, std::memory_order_relaxed);
    return task < counts_[stage] ? task : -1;
  }
  void finish_task(std::size_t stage) { done_[stage].fetch_add(1, std::memory_order_release); }
  bool finished(std::size_t stage) const { return done_[stage].load(std::memory_order_acquire) >= counts_[stage]; }

 private:
  std::array<i64, Stages> counts_;
  std::array<std::atomic<i64>, Stages> next_{}, done_{};
};

/// In scratch; counts: of each head's tasks by stage.
template <std::size_t Stages, class Counts>
std::span<HeadProgress<Stages>> make_progress(std::byte* scratch, i64 heads, const Counts& counts) {
  static_assert(sizeof(HeadProgress<Stages>) <= kHeadProgressBytes);
  HeadProgress<Stages>* const first = reinterpret_cast<HeadProgress<Stages>*>(scratch);
  for (i64 head = 0; head < heads; ++head) std::construct_at(first + head, counts(head));
  return {first, static_cast<std::size_t>(heads)};
}

/// Body: (stage, head, task, thread). A first stage is short: who finds it unfinished waits. Later stages of a head are left to
/// whoever finishes the stage before, and joined at the end.
template <std::size_t Stages, class Body> class HeadTasks {
 public:
  HeadTasks(std::span<HeadProgress<Stages>> heads, const Body& body) : heads_(heads), body_(body) {}

  void run(int threads) const {
    const i64 count = static_cast<i64>(heads_.size());
    if (count == 0) return;
    parallel_for(threads, threads, [&](i64 lane, int thread) {
      const i64 lanes = std::min<i64>(threads, count);
      for (const bool joins : {false, true})
        for (i64 offset = 0; offset < lanes; ++offset)
          for (i64 head = (lane + offset) % lanes; head < count; head += lanes) work_on(head, thread, joins);
    });
  }

 private:
  /// Counts a task as finished also when it throws: others wait for it.
  struct Finishing {
    HeadProgress<Stages>& progress;
    std::size_t stage;
    Finishing(HeadProgress<Stages>& of, std::size_t at) : progress(of), stage(at) {}
    Finishing(const Finishing&) = delete;
    Finishing& operator=(const Finishing&) = delete;
    ~Finishing() { progress.finish_task(stage); }
  };

  void work_on(i64 head, int thread, bool joins) const {
    HeadProgress<Stages>& progress = heads_[static_cast<std::size_t>(head)];
    for (std::size_t stage = 0; stage < Stages; ++stage) {
      for (i64 task; (task = progress.claim(stage)) >= 0;) {
        const Finishing mark(progress, stage);
        body_(stage, head, task, thread);
      }
      if (stage + 1 == Stages) return;
      if (stage > 0 && !joins && !progress.finished(stage)) return;
      while (!progress.finished(stage)) std::this_thread::yield();
    }
  }

  std::span<HeadProgress<Stages>> heads_;
  const Body& body_;
};

}  // namespace narrows::cpu
