#include "cpu/pool.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include <pthread.h>

namespace narrows::cpu {
namespace {

// A worker that has just finished, and a caller that waits for the last one, look for news this long before they sleep:
// about what a wake-up costs, and long enough that the phases of one attention call find the workers awake.
constexpr std::chrono::microseconds kSpin{50};

thread_local bool inside_body = false;

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

template <class Condition> void spin_until(const Condition& condition) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int turn = 0; turn < 64; ++turn) {
      if (condition()) return;
      pause_briefly();
    }
  } while (std::chrono::steady_clock::now() < end);
}

struct InsideBody {
  const bool before = std::exchange(inside_body, true);
  InsideBody() = default;
  InsideBody(const InsideBody&) = delete;
  InsideBody& operator=(const InsideBody&) = delete;
  ~InsideBody() { inside_body = before; }
};

class Pool {
 public:
  explicit Pool(Pool* parent_process) : parent_process_(parent_process) {}

  // False, and nothing done, when another call has the workers.
  bool try_run(std::int64_t count, int threads, const TaskBody& body) {
    const std::unique_lock owner(owner_, std::try_to_lock);
    if (!owner) return false;
    start_workers(threads - 1);
    next_.store(0, std::memory_order_relaxed);
    {
      const std::lock_guard lock(mutex_);
      body_ = &body;
      count_ = count;
      free_places_ = threads - 1;
      places_ = 1;
      failure_ = nullptr;
      open_ = true;
      generation_.fetch_add(1, std::memory_order_release);
    }
    work_.notify_all();
    drain(body, count, 0);
    close();
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
    return true;
  }

 private:
  void start_workers(int wanted) {
    while (workers_ < wanted) {
      try {
        std::thread([this] { work(); }).detach();
      } catch (const std::system_error&) {
        return;  // the system gives no more threads: those that there are do the work
      }
      ++workers_;
    }
  }

  void work() {
    std::uint64_t seen = 0;
    for (;;) {
      spin_until([&] { return generation_.load(std::memory_order_acquire) != seen; });
      std::unique_lock lock(mutex_);
      work_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
      seen = generation_.load(std::memory_order_relaxed);
      if (!open_ || free_places_ == 0) continue;
      --free_places_;
      const int place = places_++;
      const TaskBody& body = *body_;
      const std::int64_t count = count_;
      running_.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      drain(body, count, place);
      lock.lock();
      if (running_.fetch_sub(1, std::memory_order_release) == 1) finished_.notify_one();
    }
  }

  void drain(const TaskBody& body, std::int64_t count, int place) {
    const InsideBody mark;
    try {
      for (std::int64_t task; (task = next_.fetch_add(1, std::memory_order_relaxed)) < count;) body(task, place);
    } catch (...) {
      next_.store(count, std::memory_order_relaxed);
      const std::lock_guard lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
    }
  }

  // A worker that wakes too late finds the call closed, so a call never waits for one that sleeps.
  void close() {
    std::unique_lock lock(mutex_);
    open_ = false;
    lock.unlock();
    spin_until([&] { return running_.load(std::memory_order_acquire) == 0; });
    lock.lock();
    finished_.wait(lock, [&] { return running_.load(std::memory_order_acquire) == 0; });
  }

  [[maybe_unused]] Pool* const parent_process_;  // keeps the abandoned pool reachable for leak checkers
  std::mutex owner_;                             // held by the call that has the workers
  int workers_ = 0;                              // guarded by owner_
  std::atomic<std::int64_t> next_{0};
  std::atomic<std::uint64_t> generation_{0};
  std::atomic<int> running_{0};

  std::mutex mutex_;  // guards what follows; generation_ and running_ change under it and are watched without it
  std::condition_variable work_, finished_;
  const TaskBody* body_ = nullptr;
  std::int64_t count_ = 0;
  int free_places_ = 0, places_ = 0;
  bool open_ = false;
  std::exception_ptr failure_;
};

// Never destroyed: its threads may still sleep in it while the process exits.
std::atomic<Pool*> current_pool{nullptr};
std::atomic<Pool*> abandoned_pool{nullptr};

// A child has none of the workers, and mutexes that a vanished thread may have held: it starts afresh.
void abandon_pool() { abandoned_pool.store(current_pool.exchange(nullptr)); }

Pool& pool() {
  static const int registered = pthread_atfork(nullptr, nullptr, abandon_pool);
  static_cast<void>(registered);
  Pool* found = current_pool.load(std::memory_order_acquire);
  if (found) return *found;
  Pool* const made = new Pool(abandoned_pool.load());
  if (current_pool.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return *made;
  delete made;
  return *found;
}

}  // namespace

void parallel_for(std::int64_t count, int threads, const TaskBody& body) {
  if (count < threads) threads = static_cast<int>(count);
  if (threads > 1 && !inside_body && pool().try_run(count, threads, body)) return;
  const InsideBody mark;
  for (std::int64_t task = 0; task < count; ++task) body(task, 0);
}

}  // namespace narrows::cpu
