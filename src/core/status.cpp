#include "core/status.hpp"

#include "core/error.hpp"

#include <algorithm>

namespace narrows {
namespace {

struct Words {
  std::string argument, value, rule, nearest;
};

Words bound(std::string_view argument, i64 index, i64 value, std::string rule, i64 nearest) {
  return {text(argument, "[", index, "]"), to_text(value), std::move(rule), to_text(nearest)};
}

Words start(std::string_view argument, const CallStatus& status) {
  return bound(argument, status.sequence, status.value, status.sequence == 0 ? "must be 0" : "must be >= 0", 0);
}

Words order(std::string_view argument, const CallStatus& status) {
  return bound(argument, i64{status.sequence} + 1, status.value, text("must be >= the bound before it, ", status.limit),
               status.limit);
}

Words end(std::string_view argument, const CallStatus& status) {
  return bound(argument, i64{status.sequence} + 1, status.value, text("must be <= the tensor's rows, ", status.limit),
               status.limit);
}

Words used(std::string_view argument, const CallStatus& status) {
  return bound(argument, status.sequence, status.value,
               text("must be in [0, ", status.limit, "], the length of sequence ", status.sequence),
               std::clamp(status.value, 0, std::max(status.limit, 0)));
}

Words reach(const Problem& problem, std::string_view axis, const CallStatus& status) {
  const std::string_view argument = !problem.mask.given ? "bias" : !problem.bias.given ? "mask" : "bias or mask";
  return {std::string(argument), text("its ", axis, " axis is ", status.limit),
          text("sequence ", status.sequence, " needs ", status.value), text("1 or ", status.value)};
}

Words offset(const CallStatus& status) {
  const std::uint64_t least = std::uint64_t{static_cast<std::uint32_t>(status.value)} << 32;
  return {"offset", text(least, " or more"), "must be <= 4294967295", "4294967295"};
}

Words words(const Problem& problem, const CallStatus& status) {
  switch (static_cast<StatusCode>(status.code)) {
    case StatusCode::cu_seqlens_q_start: return start("cu_seqlens_q", status);
    case StatusCode::cu_seqlens_q_order: return order("cu_seqlens_q", status);
    case StatusCode::cu_seqlens_q_end: return end("cu_seqlens_q", status);
    case StatusCode::cu_seqlens_k_start: return start("cu_seqlens_k", status);
    case StatusCode::cu_seqlens_k_order: return order("cu_seqlens_k", status);
    case StatusCode::cu_seqlens_k_end: return end("cu_seqlens_k", status);
    case StatusCode::seqused_q: return used("seqused_q", status);
    case StatusCode::seqused_k: return used("seqused_k", status);
    case StatusCode::score_rows: return reach(problem, "sq", status);
    case StatusCode::score_keys: return reach(problem, "sk", status);
    case StatusCode::offset: return offset(status);
    case StatusCode::kept: break;
  }
  throw Error(ErrorCode::internal, text("status: code ", status.code, ": no kernel writes it"));
}

}  // namespace

std::string status_text(const Problem& problem, const CallStatus& status) {
  const Words said = words(problem, status);
  return text(said.argument, ": ", said.value, ": ", said.rule, "; nearest legal: ", said.nearest, " (", problem.text(),
              ")");
}

}  // namespace narrows
