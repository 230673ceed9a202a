// What takes long says so on stderr.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace narrows::cli {

/// Whether to speak: to a terminal, or when asked to.
struct ProgressMode {
  bool asked = false;
  bool active() const;
};

/// While it lives, "label: 12 s" on stderr every second on a terminal, in one line that goes away; else every 10 s.
class Progress {
 public:
  Progress(const ProgressMode& mode, std::string label);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress();

 private:
  void tick();

  std::string label_;
  bool terminal_ = false;
  bool done_ = false;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread ticker_;
};

}  // namespace narrows::cli
