#include "tools/child.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>

namespace narrows::cli {
namespace {

using Clock = std::chrono::steady_clock;

struct Actions {
  posix_spawn_file_actions_t actions;
  Actions() { posix_spawn_file_actions_init(&actions); }
  Actions(const Actions&) = delete;
  Actions& operator=(const Actions&) = delete;
  ~Actions() { posix_spawn_file_actions_destroy(&actions); }
};

[[noreturn]] void fail(int error) { throw std::system_error(error, std::generic_category()); }

}  // namespace

Child::Child(std::vector<std::string> words) {
  std::array<int, 2> ends{};
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) fail(errno);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  Actions spawn;
  posix_spawn_file_actions_adddup2(&spawn.actions, ends[1], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&spawn.actions, ends[1], STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&spawn.actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  const int error = ::posix_spawnp(&process_, arguments.front(), &spawn.actions, nullptr, arguments.data(), environ);
  ::close(ends[1]);
  socket_ = ends[0];
  if (error == 0) return;
  ::close(socket_);
  fail(error);
}

Child::~Child() {
  constexpr int kWaits = 100;
  constexpr std::chrono::milliseconds kWait{10};
  ::close(socket_);
  for (int wait = 0; wait < kWaits; ++wait) {
    if (::waitpid(process_, nullptr, WNOHANG) != 0) return;
    std::this_thread::sleep_for(kWait);
  }
  ::kill(process_, SIGKILL);
  ::waitpid(process_, nullptr, 0);
}

bool Child::write_line(std::string_view line) {
  std::string text(line);
  text += '\n';
  for (std::size_t sent = 0; sent < text.size();) {
    const ssize_t count = ::send(socket_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return false;
    sent += static_cast<std::size_t>(count);
  }
  return true;
}

std::optional<std::string> Child::read_line(double seconds) {
  constexpr std::size_t kMostBytes = std::size_t{1} << 20;
  const Clock::time_point end =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  for (;;) {
    if (const std::size_t newline = unread_.find('\n'); newline != std::string::npos) {
      std::string line = unread_.substr(0, newline);
      unread_.erase(0, newline + 1);
      return line;
    }
    if (unread_.size() > kMostBytes) return std::nullopt;
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - Clock::now()).count();
    pollfd ready{socket_, POLLIN, 0};
    const int polled = left > 0 ? ::poll(&ready, 1, static_cast<int>(std::min<long long>(left, 1 << 30))) : 0;
    if (polled < 0 && errno == EINTR) continue;
    if (polled <= 0) return std::nullopt;
    std::array<char, 4096> bytes{};
    const ssize_t count = ::recv(socket_, bytes.data(), bytes.size(), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return std::nullopt;
    unread_.append(bytes.data(), static_cast<std::size_t>(count));
  }
}

}  // namespace narrows::cli
