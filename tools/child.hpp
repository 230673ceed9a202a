// Another program that answers lines with lines.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace narrows::cli {

class Child {
 public:
  /// Starts words[0], found on PATH, with a socket as its stdin and stdout, and /dev/null as its stderr. Throws
  /// std::system_error where it cannot.
  explicit Child(std::vector<std::string> words);
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  /// Waits a moment for the program to end by itself, which sees the end of its input; then kills it.
  ~Child();

  /// False when the program has gone.
  bool write_line(std::string_view line);
  /// Without its newline. Empty when the program ended, said nothing complete for so many seconds or too much.
  std::optional<std::string> read_line(double seconds);

 private:
  int socket_ = -1;
  pid_t process_ = -1;
  std::string unread_;
};

}  // namespace narrows::cli
