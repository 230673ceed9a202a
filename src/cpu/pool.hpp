// The CPU backend's threads: one set for the process, asleep between calls.
#pragma once

#include <cstdint>

namespace narrows::cpu {

/// What parallel_for runs: any callable, which it does not copy. Unlike std::function it never allocates.
class TaskBody {
 public:
  template <class Callable>
  TaskBody(const Callable& callable)
      : callable_(&callable), call_([](const void* object, std::int64_t task, int thread) {
          (*static_cast<const Callable*>(object))(task, thread);
        }) {}
  void operator()(std::int64_t task, int thread) const { call_(callable_, task, thread); }

 private:
  const void* callable_;
  void (*call_)(const void*, std::int64_t, int);
};

/// Runs body(task, thread) once for every task in [0, count), handed out in ascending order, on at most `threads` threads,
/// the caller among them as thread 0; returns when all have finished. No two tasks run at once with the same `thread`,
/// which is below `threads`. The first exception of a body stops the handing out and is rethrown here.
///
/// A call from inside a body, and one made while another call has the workers, runs all its tasks on its own thread: there
/// are never more busy threads than callers plus the workers of one call. Safe from any number of threads, and in the child
/// of a fork.
void parallel_for(std::int64_t count, int threads, const TaskBody& body);

}  // namespace narrows::cpu
