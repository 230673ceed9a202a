#include "tools/progress.hpp"

#include <chrono>
#include <cstdio>
#include <utility>

#include <unistd.h>

#include <fmt/format.h>

namespace narrows::cli {

bool ProgressMode::active() const { return asked || ::isatty(STDERR_FILENO) != 0; }

Progress::Progress(const ProgressMode& mode, std::string label)
    : label_(std::move(label)), terminal_(::isatty(STDERR_FILENO) != 0) {
  if (mode.asked && !terminal_) fmt::print(stderr, "narrows: {}\n", label_);
  if (mode.active()) ticker_ = std::thread([this] { tick(); });
}

Progress::~Progress() {
  if (!ticker_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
  }
  wake_.notify_all();
  ticker_.join();
}

void Progress::tick() {
  const std::chrono::seconds step(terminal_ ? 1 : 10);
  std::unique_lock lock(mutex_);
  bool shown = false;
  for (std::chrono::seconds passed = step; !wake_.wait_for(lock, step, [this] { return done_; }); passed += step) {
    fmt::print(stderr, "{}narrows: {}: {} s{}", terminal_ ? "\r" : "", label_, passed.count(), terminal_ ? "" : "\n");
    std::fflush(stderr);
    shown = true;
  }
  if (shown && terminal_) fmt::print(stderr, "\r\033[K");
}

}  // namespace narrows::cli
