// The lanes of a thread block on the host: each has a stack of its own, they take turns in one thread, and a lane gives its
// turn on where it waits for others. So the order is the same in every run, and lanes that wait for ever are found at once.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <sanitizer/common_interface_defs.h>

#include "tests/support/sanitizer.hpp"

namespace narrows::test {

class Turns {
  static constexpr std::size_t kStackBytes = 256 << 10;

  struct Place {  // where a lane, or who called run(), goes on
    ucontext_t context{};
    std::unique_ptr<char[]> stack;
    const void* stack_begin = nullptr;
    std::size_t stack_bytes = 0;
    void* stack_notes = nullptr;  // AddressSanitizer's
  };

 public:
  /// Lanes that wait for the same.
  class Waiting {
   public:
    void wait() {
      waiting_.push_back(now_->running_);
      now_->pass_on();
    }
    void wake() {
      now_->ready_.insert(now_->ready_.end(), waiting_.begin(), waiting_.end());
      waiting_.clear();
    }

   private:
    std::vector<Place*> waiting_;
  };

  /// Runs body(0) .. body(lanes - 1) to their ends; ends the program where all lanes that are left wait.
  static void run(unsigned lanes, const std::function<void(unsigned)>& body) {
    Turns turns(lanes, body);
    Turns* const outer = std::exchange(now_, &turns);
    turns.running_ = &turns.caller_;
    turns.pass_on();
    now_ = outer;
  }

 private:
  Turns(unsigned lanes, const std::function<void(unsigned)>& body) : lanes_(lanes), body_(body), unfinished_(lanes) {
    for (Place& lane : lanes_) {
      lane.stack.reset(new char[kStackBytes]);  // not cleared
      lane.stack_begin = lane.stack.get();
      lane.stack_bytes = kStackBytes;
      getcontext(&lane.context);
      lane.context.uc_stack.ss_sp = lane.stack.get();
      lane.context.uc_stack.ss_size = kStackBytes;
      makecontext(&lane.context, &Turns::lane_begins, 0);
      // Or AddressSanitizer, which pass_on() tells of the stack, forgets all it knows of it at each switch: a fifth of the time.
      lane.context.uc_stack = {};
      ready_.push_back(&lane);
    }
  }

  static void lane_begins() {
    Turns& turns = *now_;
    turns.arrived_at_place(nullptr);
    turns.body_(static_cast<unsigned>(turns.running_ - turns.lanes_.data()));
    if (--turns.unfinished_ == 0) turns.ready_.push_back(&turns.caller_);
    turns.pass_on(true);
  }

  /// To the lane that has been ready for longest; comes back when this one is woken and its turn is there.
  void pass_on(bool finished = false) {
    if (ready_.empty()) {
      std::fprintf(stderr, "%u lanes wait for one another\n", unfinished_);
      std::abort();
    }
    Place& from = *running_;
    running_ = ready_.front();
    ready_.pop_front();
    if constexpr (kAddressSanitizer)
      __sanitizer_start_switch_fiber(finished ? nullptr : &from.stack_notes, running_->stack_begin,
                                     running_->stack_bytes);
    if (finished)
      setcontext(&running_->context);
    else
      swapcontext(&from.context, &running_->context);
    arrived_at_place(from.stack_notes);
  }

  /// What AddressSanitizer is told on a stack that was just entered; where the first lane came from is the caller's stack.
  void arrived_at_place(void* stack_notes) {
    if constexpr (kAddressSanitizer) {
      const void* begin = nullptr;
      std::size_t bytes = 0;
      __sanitizer_finish_switch_fiber(stack_notes, &begin, &bytes);
      if (!caller_.stack_begin) caller_.stack_begin = begin, caller_.stack_bytes = bytes;
    }
  }

  static inline thread_local Turns* now_ = nullptr;

  Place caller_;
  std::vector<Place> lanes_;
  const std::function<void(unsigned)>& body_;
  unsigned unfinished_;
  std::deque<Place*> ready_;
  Place* running_ = nullptr;
};

}  // namespace narrows::test
