#include "tools/options.hpp"

#include <algorithm>
#include <array>
#include <limits>

#include <fmt/format.h>

#include "core/error.hpp"
#include "tools/files/failure.hpp"
#include "tools/text.hpp"

namespace narrows::cli {
namespace {

constexpr std::array kTensorNames{
    TensorName{"alibi_slopes", &Options::alibi_slopes, TensorName::floats, "slopes"},
    TensorName{"bias", &Options::bias, TensorName::floats},
    TensorName{"sinks", &Options::sinks, TensorName::floats},
    TensorName{"mask", &Options::mask, TensorName::booleans},
    TensorName{"shift", &Options::shift, TensorName::indices},
    TensorName{"key_begin", &Options::key_begin, TensorName::indices},
    TensorName{"key_end", &Options::key_end, TensorName::indices},
    TensorName{"cu_seqlens_q", &Options::cu_seqlens_q, TensorName::indices, "cu_seqlens"},
    TensorName{"cu_seqlens_k", &Options::cu_seqlens_k, TensorName::indices, "cu_seqlens"},
    TensorName{"seqused_q", &Options::seqused_q, TensorName::indices},
    TensorName{"seqused_k", &Options::seqused_k, TensorName::indices},
    TensorName{"cache_seqlens", &Options::cache_seqlens, TensorName::indices},
    TensorName{"block_table", &Options::block_table, TensorName::indices},
    TensorName{"cache_batch_idx", &Options::cache_batch_idx, TensorName::indices},
    TensorName{"leftpad", &Options::leftpad, TensorName::indices},
    TensorName{"k_new", &Options::k_new, TensorName::floats},
    TensorName{"v_new", &Options::v_new, TensorName::floats},
    TensorName{"cu_seqlens_k_new", &Options::cu_seqlens_k_new, TensorName::indices},
    TensorName{"rotary_cos", &Options::rotary_cos, TensorName::floats},
    TensorName{"rotary_sin", &Options::rotary_sin, TensorName::floats},
    TensorName{"rotary_base", &Options::rotary_base, TensorName::indices},
};

/// As `tensor`, with dashes.
std::string option_name(std::string tensor) {
  std::replace(tensor.begin(), tensor.end(), '_', '-');
  return "--" + tensor;
}

void add_integers(CLI::App& command, CallOptions& call, const char* tensor, const OptionText& text) {
  add_option(command, option_name(tensor), text, [&call, tensor](const std::string& option, const std::string& list) {
    call.integers[tensor] = parse_int32s(option, list);
  });
}

std::vector<std::int64_t> exactly(const std::string& option, const std::string& text, std::size_t count,
                                  std::string_view form) {
  const std::vector<std::string_view> parts = split(text);
  if (parts.size() != count)
    refuse_value(option, files::printable(text), fmt::format("must be {}: {} whole numbers", form, count));
  std::vector<std::int64_t> values;
  for (const std::string_view part : parts) values.push_back(parse_integer(option, part));
  return values;
}

int parse_int(const std::string& option, const std::string& text) {
  using Limits = std::numeric_limits<int>;
  return static_cast<int>(parse_integer(option, text, Limits::min(), Limits::max()));
}

Causal parse_causal(const std::string& text) {
  if (text == "bottom_right" || text == "true") return Causal::bottom_right;
  if (text == "top_left") return Causal::top_left;
  if (text == "false" || text == "none") return Causal::none;
  refuse_value("--causal", files::printable(text), "must be bottom_right, top_left or none");
}

void add_scores(CLI::App& command, CallOptions& call) {
  const std::string group = "Scores";
  Options& values = call.values;
  const auto reals = [&](const char* tensor, const char* help) {
    add_option(
        command, option_name(tensor), {"LIST", help, group},
        [&call, tensor](const auto& option, const auto& list) { call.reals[tensor] = parse_floats(option, list); });
  };
  add_option(command, "--scale", {"NUMBER", "Factor of Q K^T, any finite number; default 1/sqrt(d)", group},
             [&values](const auto& option, const auto& text) { values.scale = parse_real(option, text); });
  add_option(command, "--softcap", {"NUMBER", "Scores s become cap * tanh(s / cap); 0 = off", group},
             [&values](const auto& option, const auto& text) { values.softcap = parse_real(option, text); });
  reals("alibi_slopes", "-slope * |p - j| is added to the scores (h numbers)");
  reals("sinks", "A logit for each head that has no value row (h numbers)");
  add_option(command, "--dropout", {"P", "Probability of dropping an element of P, [0, 1)", group},
             [&values](const auto& option, const auto& text) { values.dropout = parse_real(option, text); });
  add_option(command, "--seed", {"N", "Seed of dropout", group},
             [&values](const auto& option, const auto& text) { values.seed = parse_unsigned(option, text); });
  add_option(command, "--offset", {"N", "Offset of dropout's random numbers, below 2^32", group},
             [&values](const auto& option, const auto& text) { values.offset = parse_unsigned(option, text); });
  add_option(command, "--origin", {"b,h,i,j,H", "Where this call stands in a larger one (dropout)", group},
             [&values](const auto& option, const auto& text) {
               const auto at = exactly(option, text, 5, "b,h,i,j,H");
               values.origin = {at[0], at[1], at[2], at[3], at[4]};
             });
}

void add_visibility(CLI::App& command, CallOptions& call) {
  const std::string group = "Which keys a query sees (query i stands at p = i + shift; all rules intersect)";
  Options& values = call.values;
  add_option(command, "--causal",
             {"[=TYPE]", "Keys j <= p: bottom_right (without TYPE; shift = sk - sq) or top_left (shift = 0)", group},
             [&values](const auto&, const auto& text) { values.causal = parse_causal(text); });
  add_option(command, "--window", {"LEFT,RIGHT", "Keys p - LEFT to p + RIGHT, both included; -1 = unlimited", group},
             [&values](const auto& option, const auto& text) {
               const auto sides = exactly(option, text, 2, "LEFT,RIGHT");
               values.window = {sides[0], sides[1]};
             });
  add_option(command, "--chunk", {"N", "Keys of the query's own chunk of N positions; 0 = off", group},
             [&values](const auto& option, const auto& text) { values.chunk = parse_integer(option, text); });
  add_integers(command, call, "shift", {"LIST", "The shift of each sequence (b numbers); default sk - sq", group});
}

void add_lengths(CLI::App& command, CallOptions& call) {
  const std::string group = "Lengths (here or as tensors of these names in a file)";
  const auto add = [&](const char* tensor, const char* help) {
    add_integers(command, call, tensor, {"LIST", help, group});
  };
  add("cu_seqlens_q", "Bounds of the sequences in q (total, h, d): 0,...,total");
  add("cu_seqlens_k", "Bounds of the sequences in k and v");
  add("seqused_q", "Rows used of each sequence of q (b numbers)");
  add("seqused_k", "Rows used of each sequence of k and v");
}

void add_cache(CLI::App& command, CallOptions& call) {
  const std::string group = "KV cache (k and v are the cache; block_table, new keys and tables come from a file)";
  const auto add = [&](const char* tensor, const char* help) {
    add_integers(command, call, tensor, {"LIST", help, group});
  };
  add("cache_seqlens", "Slots filled of each sequence, leftpad included, before new keys (b numbers)");
  add("cache_batch_idx", "Cache row of each sequence");
  add("leftpad", "Slots skipped at the front of each sequence");
  add("cu_seqlens_k_new", "Bounds of the sequences in k_new and v_new");
  add("rotary_base", "Position of query 0 of each sequence; default cache_seqlens");
  add_flag(command, "--rotary-interleaved", call.values.rotary_interleaved,
           {"", "Rotary pairs are (2i, 2i + 1)", group});
}

void add_computing(CLI::App& command, CallOptions& call) {
  const std::string group = "How to compute";
  Options& values = call.values;
  add_option(command, "--threads", {"N", "CPU threads; 0 = NARROWS_THREADS, else every core", group},
             [&values](const auto& option, const auto& text) { values.threads = parse_int(option, text); });
  add_option(command, "--family", {"NAME", "Force a family (see narrows info)", group},
             [&call](const auto&, const auto& text) { call.family = text; });
  add_option(command, "--num-splits", {"N", "Splits of the keys; 0 = the plan decides", group},
             [&values](const auto& option, const auto& text) { values.num_splits = parse_int(option, text); });
  add_flag(command, "--deterministic", values.deterministic, {"", "Gradients repeat bit for bit", group});
  add_flag(command, "--batch-invariant", values.batch_invariant,
           {"", "A row's bits do not depend on its neighbours", group});
}

/// A list has no strides and lives as long as its map.
template <class Lists> void point_to(Lists& lists, Options& values) {
  for (const TensorName& tensor : kTensorNames)
    if (const auto list = lists.find(tensor.name); list != lists.end())
      values.*tensor.member = view(list->second.data(), Dims{static_cast<std::int64_t>(list->second.size())});
}

}  // namespace

Options CallOptions::complete() {
  Options complete = values;
  complete.family = family;
  point_to(integers, complete);
  point_to(reals, complete);
  return complete;
}

void add_call_options(CLI::App& command, CallOptions& options) {
  add_scores(command, options);
  add_visibility(command, options);
  add_lengths(command, options);
  add_cache(command, options);
  add_computing(command, options);
}

std::span<const TensorName> tensor_names() { return kTensorNames; }

}  // namespace narrows::cli
