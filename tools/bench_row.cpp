#include "tools/bench_row.hpp"

#include <algorithm>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tools/text.hpp"

namespace narrows::cli {
namespace {

using Json = nlohmann::ordered_json;

Json facts_of(const Row& row) {
  return {{"op", name(row.op)},
          {"backend", "cpu"},
          {"family", "cpu"},
          {"dtype", narrows::name(row.dtype)},
          {"b", row.b},
          {"h", row.h},
          {"hk", row.hk},
          {"sq", row.sq},
          {"sk", row.sk},
          {"d", row.d},
          {"dv", row.dv},
          {"causal", row.causal},
          {"case", row.special == Case::plain ? "" : name(row.special)},
          {"threads", row.threads}};
}

constexpr const char* kColumns =
    "{:<8} {:<6} {:<5} {:>3} {:>3} {:>3} {:>6} {:>6} {:>4} {:>4} {:<6} {:<9} {:>7} {:>9} {:>9} {:>8} {:>7} {:>8} "
    "{:>8} {:>7} {}\n";

}  // namespace

std::string_view name(Op op) {
  switch (op) {
    case Op::forward: return "forward";
    case Op::backward: return "backward";
    case Op::decode: return "decode";
  }
  return "unknown";
}

std::string_view name(Case special) {
  switch (special) {
    case Case::plain: return "plain";
    case Case::bias: return "bias";
    case Case::mask: return "mask";
    case Case::softcap: return "softcap";
    case Case::alibi: return "alibi";
    case Case::dropout: return "dropout";
    case Case::window512: return "window512";
    case Case::varlen: return "varlen";
    case Case::gqa4: return "gqa4";
    case Case::paged16: return "paged16";
  }
  return "unknown";
}

std::map<std::string, double>::const_iterator Row::fastest_peer() const {
  return std::min_element(peers.begin(), peers.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
}

std::string request_of(const Row& row) { return facts_of(row).dump(); }

std::string as_json(const Row& row) {
  Json object = facts_of(row);
  object["ms"] = row.milliseconds;
  object["best_ms"] = row.best_milliseconds;
  object[row.op == Op::decode ? "gbps" : "tflops"] = row.rate;
  object["peak"] = row.peak;
  object["fraction"] = row.fraction();
  object["extra_bytes"] = row.extra_bytes;
  object["peers"] = Json::object();
  for (const auto& [peer, milliseconds] : row.peers) object["peers"][peer] = milliseconds;
  const auto against = row.fastest_peer();
  object["against"] = against == row.peers.end() ? Json(nullptr) : Json(against->first);
  object["ratio"] = against == row.peers.end() ? Json(nullptr) : Json(against->second / row.milliseconds);
  return object.dump();
}

std::string heading(Op op) {
  return fmt::format(kColumns, "op", "family", "dtype", "b", "h", "hk", "sq", "sk", "d", "dv", "causal", "case",
                     "threads", "ms", "best_ms", op == Op::decode ? "GB/s" : "TFLOP/s", "peak", "fraction", "extra",
                     "ratio", "against");
}

std::string as_text(const Row& row) {
  const int digits = row.op == Op::decode ? 2 : 4;
  const auto against = row.fastest_peer();
  const bool alone = against == row.peers.end();
  return fmt::format(kColumns, name(row.op), "cpu", narrows::name(row.dtype), row.b, row.h, row.hk, row.sq, row.sk,
                     row.d, row.dv, row.causal ? "true" : "false", name(row.special), row.threads,
                     fmt::format("{:.3f}", row.milliseconds), fmt::format("{:.3f}", row.best_milliseconds),
                     fmt::format("{:.{}f}", row.rate, digits), fmt::format("{:.{}f}", row.peak, digits),
                     fmt::format("{:.3f}", row.fraction()), with_prefix(static_cast<double>(row.extra_bytes), "B"),
                     alone ? "-" : fmt::format("{:.2f}", against->second / row.milliseconds),
                     alone ? "-" : against->first);
}

}  // namespace narrows::cli
