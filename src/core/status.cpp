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

/// Of a (b) tensor whose value must be in [0, most].
Words value(std::string_view argument, const CallStatus& status, i64 most, std::string_view meaning) {
  return bound(argument, status.sequence, status.value, text("must be in [0, ", most, "], ", meaning),
               std::clamp<i64>(status.value, 0, std::max<i64>(most, 0)));
}

Words leftpad(const Problem& problem, const CallStatus& status) {
  if (status.value < 0 || status.value > problem.capacity)
    return value("leftpad", status, problem.capacity, "the cache's capacity");
  return bound("leftpad", status.sequence, status.value,
               text("must be <= cache_seqlens[", status.sequence, "] = ", status.limit), status.limit);
}

Words capacity(const Problem& problem, const CallStatus& status) {
  return bound(
      "cache_seqlens", status.sequence, status.value,
      text(problem.capacity - status.limit, " new keys do not fit in the cache's capacity, ", problem.capacity),
      std::max(status.limit, 0));
}

Words block_table(const CallStatus& status) {
  return {text("block_table of sequence ", status.sequence), to_text(status.value),
          text("must be in [0, ", status.limit, "]: a key that is seen or appended lies in this page"),
          to_text(std::clamp(status.value, 0, std::max(status.limit, 0)))};
}

Words rotary_reach(const Problem& problem, const CallStatus& status) {
  return {
      "rotary_cos", text("shape ", Dims{status.limit, problem.rotary_pairs}),
      text("sequence ", status.sequence, " rotates position ", status.value - 1, ": needs that many rows and one more"),
      to_text(status.value)};
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
    case StatusCode::cu_seqlens_k_new_start: return start("cu_seqlens_k_new", status);
    case StatusCode::cu_seqlens_k_new_order: return order("cu_seqlens_k_new", status);
    case StatusCode::cu_seqlens_k_new_end: return end("cu_seqlens_k_new", status);
    case StatusCode::cache_seqlens: return value("cache_seqlens", status, status.limit, "the cache's capacity");
    case StatusCode::cache_batch_idx: return value("cache_batch_idx", status, status.limit, "the cache's rows");
    case StatusCode::leftpad: return leftpad(problem, status);
    case StatusCode::capacity: return capacity(problem, status);
    case StatusCode::block_table: return block_table(status);
    case StatusCode::rotary_base: return bound("rotary_base", status.sequence, status.value, "must be >= 0", 0);
    case StatusCode::rotary_reach: return rotary_reach(problem, status);
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
