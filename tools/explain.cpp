// narrows explain: what a call costs, from its shapes alone.
#include <cstdio>
#include <memory>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "api/explained.hpp"
#include "core/environment.hpp"
#include "core/error.hpp"
#include "tools/calls.hpp"
#include "tools/commands.hpp"
#include "tools/device.hpp"
#include "tools/text.hpp"

namespace narrows::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Explain {
  Reading reading;
  CallOptions options;
  std::optional<std::int64_t> b, h, hk, sq, sk, d, dv;
  std::optional<DType> dtype;
  Dims bias, mask;
  DeviceChoice device;
  bool json = false;
};

Tensor shaped(DType dtype, const Dims& shape) { return {nullptr, dtype, shape, {}, Device{}}; }

std::int64_t needed(const std::optional<std::int64_t>& value, const char* option) {
  if (!value) refuse_value(option, "not given", "a call is described by a FILE or by --sq and --d at least");
  return *value;
}

/// (b, rows, heads, dim), or (total, heads, dim) where the list of bounds is given.
Tensor described(const Explain& explain, const char* bounds, const char* rows_option,
                 const std::optional<std::int64_t>& rows, std::int64_t heads, std::int64_t dim) {
  const DType dtype = explain.dtype.value_or(DType::fp32);
  const auto list = explain.options.integers.find(bounds);
  if (list == explain.options.integers.end())
    return shaped(dtype, {explain.b.value_or(1), needed(rows, rows_option), heads, dim});
  if (rows) refuse_value(rows_option, *rows, fmt::format("{} already says how many rows there are", bounds));
  if (explain.b) refuse_value("--b", *explain.b, fmt::format("{} already says how many sequences there are", bounds));
  return shaped(dtype, {list->second.back(), heads, dim});
}

FileCall described(Explain& explain) {
  FileCall call;
  call.options = explain.options.complete();
  const std::int64_t d = needed(explain.d, "--d"), h = explain.h.value_or(1), hk = explain.hk.value_or(h);
  const bool varlen = explain.options.integers.contains("cu_seqlens_q");
  const std::optional<std::int64_t> sk = explain.sk || varlen ? explain.sk : explain.sq;
  call.in.q = described(explain, "cu_seqlens_q", "--sq", explain.sq, h, d);
  call.in.k = described(explain, "cu_seqlens_k", "--sk", sk, hk, d);
  call.in.v = described(explain, "cu_seqlens_k", "--sk", sk, hk, explain.dv.value_or(d));
  if (!explain.bias.empty()) call.options.bias = shaped(call.in.q.dtype, explain.bias);
  if (!explain.mask.empty()) call.options.mask = shaped(DType::boolean, explain.mask);
  return call;
}

void refuse_shapes(const Explain& explain) {
  const bool shapes = explain.b || explain.h || explain.hk || explain.sq || explain.sk || explain.d || explain.dv ||
                      !explain.bias.empty() || !explain.mask.empty();
  if (shapes)
    refuse_value("FILE", joined(explain.reading.paths),
                 "its tensors have shapes; --b, --h, --hk, --sq, --sk, --d, --dv, "
                 "--bias-shape and --mask-shape describe a call without a file");
}

std::string json_of(const std::string& call, const Explanation& explanation) {
  const Json object{{"call", call},
                    {"problem", explanation.problem},
                    {"family", explanation.family},
                    {"plan", explanation.plan},
                    {"refused", explanation.refused},
                    {"visible_pairs", explanation.visible_pairs},
                    {"flops", explanation.flops},
                    {"fused_bytes", explanation.fused_bytes},
                    {"three_kernel_bytes", explanation.three_kernel_bytes},
                    {"fused_memory", explanation.fused_memory},
                    {"three_kernel_memory", explanation.three_kernel_memory},
                    {"fused_intensity", explanation.fused_intensity},
                    {"three_kernel_intensity", explanation.three_kernel_intensity},
                    {"predicted_seconds", explanation.predicted_seconds},
                    {"three_kernel_seconds", explanation.three_kernel_seconds},
                    {"limited_by", explanation.limited_by},
                    {"fused_l2_bytes", explanation.fused_l2_bytes}};
  return object.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Explanation explanation_of(const FileCall& call, bool backward) {
  if (!backward) return narrows::explain(call.in, call.options);
  const std::string family = call.options.family.empty() ? environment::family() : std::string(call.options.family);
  return explained(make_explained_backward(call.in, call.options), family);
}

int run(Explain& explain) {
  FileCalls file_calls;
  if (explain.reading.paths.empty()) {
    file_calls.calls.push_back(described(explain));
  } else {
    refuse_shapes(explain);
    explain.reading.dtype = explain.dtype;
    file_calls = read_calls(explain.reading, explain.options);
    note_unused(file_calls);
  }
  for (const FileCall& call : file_calls.calls) {
    const bool backward = explain.reading.backward;
    const std::string label = call.prefix.empty() ? "" : call.prefix + ": ";
    const Device device = device_for(call, backward, explain.device, label);
    const Explanation explanation = explanation_of(labelled(call, device), backward);
    const bool first = &call == file_calls.calls.data();
    if (explain.json)
      fmt::print("{}\n", json_of(call.prefix, explanation));
    else
      fmt::print("{}{}{}", first ? "" : "\n", label, explanation.text());
  }
  return kOk;
}

Dims parse_shape(const std::string& option, const std::string& text) {
  const std::vector<std::string_view> parts = split(text);
  if (parts.size() > 4) refuse_value(option, text, "must have at most 4 sizes, B,H,SQ,SK");
  Dims shape;
  for (const std::string_view part : parts) shape.push_back(parse_integer(option, part));
  return shape;
}

void add_shape_options(CLI::App& command, const std::shared_ptr<Explain>& options) {
  const std::string group = "Shape of the call, without a file";
  const auto size = [&](const char* name, std::optional<std::int64_t> Explain::*member, const char* help) {
    add_option(command, name, {"N", help, group},
               [options, member](const std::string& option, const std::string& text) {
                 (*options).*member = parse_integer(option, text);
               });
  };
  size("--b", &Explain::b, "Batch; default 1");
  size("--h", &Explain::h, "Query heads; default 1");
  size("--hk", &Explain::hk, "Kv heads; default h");
  size("--sq", &Explain::sq, "Query sequence length");
  size("--sk", &Explain::sk, "Key sequence length; default sq");
  size("--d", &Explain::d, "Head dim of q and k");
  size("--dv", &Explain::dv, "Head dim of v and o; default d");
  const auto shape = [&](const char* name, Dims Explain::*member, const char* help) {
    add_option(command, name, {"B,H,SQ,SK", help, group},
               [options, member](const std::string& option, const std::string& text) {
                 (*options).*member = parse_shape(option, text);
               });
  };
  shape("--bias-shape", &Explain::bias, "With a bias of this shape");
  shape("--mask-shape", &Explain::mask, "With a mask of this shape");
}

constexpr const char* kExplainHelp =
    "Bytes are those that must cross between memory and chip: each of q, k, v, o and lse once, and for three-kernel\n"
    "attention S and P written and read. Times are predicted from rates measured on this CPU, or from the GPU's "
    "numbers.\n\n"
    "  narrows explain --sq 4096 --d 64 --h 16 --causal\n"
    "  narrows explain --b 2 --h 8 --hk 2 --sq 4096 --sk 8192 --d 128 --dtype bf16 --window 1024,0\n"
    "  narrows explain --h 8 --d 64 --cu_seqlens_q 0,100,612 --cu_seqlens_k 0,100,612\n"
    "  narrows explain --sq 4096 --d 64 --h 16 --causal --backward\n"
    "  narrows explain layers.safetensors --json";

}  // namespace

Command add_explain(CLI::App& app) {
  CLI::App& command = add_command(app, "explain", "Say what a call costs and how it would be computed", kExplainHelp);
  const auto options = std::make_shared<Explain>();
  add_files(command, options->reading.paths, "Files as `narrows run` takes them; shapes and lengths count", false);
  add_option(command, "--dtype", {"TYPE", "fp16, bf16, fp32 or fp64; default fp32, or the file's"},
             [options](const auto& option, const auto& text) { options->dtype = parse_dtype(option, text); });
  add_flag(command, "--backward", options->reading.backward, {"", "The gradients of the call, all that it has"});
  add_flag(command, "--json", options->json, {"", "One object a line on stdout, nothing else there"});
  add_shape_options(command, options);
  add_reading_options(command, options->reading);
  add_call_options(command, options->options);
  add_device_option(command, options->device);
  return [options] { return run(*options); };
}

}  // namespace narrows::cli
