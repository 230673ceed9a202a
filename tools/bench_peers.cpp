#include "tools/bench_peers.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <system_error>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "core/error.hpp"
#include "tools/files/failure.hpp"

namespace narrows::cli {
namespace {

/// Frameworks load for a while; the slowest call that was seen took 15 s.
constexpr double kAnswerSeconds = 300;

nlohmann::json parsed(const std::string& line) { return nlohmann::json::parse(line, nullptr, false); }

/// Fit for a terminal.
std::string shown(const std::string& text) {
  const std::string quoted = files::printable(text);
  return quoted.substr(1, quoted.size() - 2);
}

bool is_name(std::string_view text) {
  constexpr std::size_t kMost = 32;
  return !text.empty() && text.size() <= kMost && std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_';
  });
}

/// An object of texts by the names of peers; nothing where it is anything else.
std::optional<std::map<std::string, std::string>> texts_of(const nlohmann::json& answer, const char* key) {
  if (!answer.is_object() || !answer.contains(key) || !answer[key].is_object()) return std::nullopt;
  std::map<std::string, std::string> texts;
  for (const auto& [name, text] : answer[key].items()) {
    if (!is_name(name) || !text.is_string()) return std::nullopt;
    texts[name] = shown(text.get<std::string>());
  }
  return texts;
}

bool is_time(const nlohmann::json& value) {
  return value.is_number() && std::isfinite(value.get<double>()) && value.get<double>() > 0;
}

}  // namespace

Peers::Peers(const std::string& python, bool asked) {
  try {
    child_ = std::make_unique<Child>(std::vector<std::string>{python, "-c", kPeersScript});
  } catch (const std::system_error& error) {
    if (asked) refuse_value("--peers", files::printable(python), "cannot be started: " + error.code().message());
    return;
  }
  const std::optional<std::string> line = child_->read_line(kAnswerSeconds);
  const nlohmann::json hello = line ? parsed(*line) : nlohmann::json();
  const auto peers = texts_of(hello, "peers"), missing = texts_of(hello, "missing");
  if (!peers || !missing) {
    child_.reset();
    if (asked) note(fmt::format("--peers {}: gave no list of peers", files::printable(python)));
    return;
  }
  found_ = *peers;
  if (asked)
    for (const auto& [name, why] : *missing) note(fmt::format("no peer {}: {}", name, why));
  if (found_.empty()) child_.reset();
}

std::vector<std::string> Peers::prepare(const Row& row) {
  const std::optional<std::string> line = ask(R"("do":"prepare","row":)" + request_of(row));
  if (!line) return {};
  const nlohmann::json answer = parsed(*line);
  const auto failed = texts_of(answer, "failed");
  if (!failed || !answer.contains("ready") || !answer["ready"].is_array()) {
    end("gave no list of peers for a row");
    return {};
  }
  for (const auto& [name, why] : *failed) note(fmt::format("peer {} failed: {}", name, why));
  std::vector<std::string> ready;
  for (const nlohmann::json& name : answer["ready"])
    if (name.is_string() && found_.contains(name.get<std::string>())) ready.push_back(name.get<std::string>());
  return ready;
}

std::vector<double> Peers::time(const std::string& peer, double seconds) {
  const std::optional<std::string> line =
      ask(fmt::format(R"("do":"time","peer":{},"seconds":{})", nlohmann::json(peer).dump(), seconds));
  if (!line) return {};
  const nlohmann::json answer = parsed(*line);
  if (answer.contains("error") && answer["error"].is_string()) {
    note(fmt::format("peer {} failed: {}", peer, shown(answer["error"].get<std::string>())));
    return {};
  }
  const bool times = answer.contains("ms") && answer["ms"].is_array() && !answer["ms"].empty() &&
                     std::all_of(answer["ms"].begin(), answer["ms"].end(), is_time);
  if (!times) {
    end("gave no times");
    return {};
  }
  return answer["ms"].get<std::vector<double>>();
}

std::optional<std::string> Peers::ask(const std::string& request) {
  if (!child_) return std::nullopt;
  const int id = ++asked_;
  std::optional<std::string> line;
  if (child_->write_line(fmt::format("{{\"id\":{},{}}}", id, request))) line = child_->read_line(kAnswerSeconds);
  if (!line) {
    end(fmt::format("ended, or gave no answer for {} s", kAnswerSeconds));
    return std::nullopt;
  }
  const nlohmann::json answer = parsed(*line);
  if (!answer.is_object() || !answer.contains("id") || answer["id"] != id) {
    end("answered what was not asked");
    return std::nullopt;
  }
  return line;
}

void Peers::end(const std::string& why) {
  note(fmt::format("the interpreter of peers {}; rows from here on have none", why));
  child_.reset();
}

void Peers::note(const std::string& text) {
  if (noted_.insert(text).second) fmt::print(stderr, "narrows: bench: {}\n", text);
}

}  // namespace narrows::cli
