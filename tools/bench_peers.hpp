// Other libraries that compute attention, timed beside ours: bench/peers.py in a Python interpreter of its own process.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tools/bench_row.hpp"
#include "tools/child.hpp"

namespace narrows::cli {

/// Whatever the interpreter does, a measurement of ours goes on: rows lack what failed, and stderr says why, once.
class Peers {
 public:
  Peers() = default;  // none
  /// Starts `python`. Where it is not what the user asked for and gives no peer, nothing is said.
  Peers(const std::string& python, bool asked);

  /// Names and versions.
  const std::map<std::string, std::string>& found() const { return found_; }
  /// Makes the tensors of a row; gives the names of those that compute it.
  std::vector<std::string> prepare(const Row& row);
  /// Milliseconds of calls, warm, until `seconds` are spent, of one at least; none where it failed.
  std::vector<double> time(const std::string& peer, double seconds);

 private:
  /// The answer to a request, an object of JSON; without one the interpreter is given up.
  std::optional<std::string> ask(const std::string& request);
  void end(const std::string& why);
  void note(const std::string& text);

  std::unique_ptr<Child> child_;
  std::map<std::string, std::string> found_;
  std::set<std::string> noted_;
  int asked_ = 0;
};

/// The text of bench/peers.py, which is part of the command.
extern const char* const kPeersScript;

}  // namespace narrows::cli
