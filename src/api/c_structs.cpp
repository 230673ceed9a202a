#include "api/c_structs.hpp"

#include "api/c_boundary.hpp"

namespace narrows::boundary {
namespace {

// Bytes in release 0.1, which no later release changes.
constexpr std::size_t kFirstInputs = 344;
constexpr std::size_t kFirstOutputs = 232;
constexpr std::size_t kFirstBackwardInputs = 792;
constexpr std::size_t kFirstGradients = 680;
constexpr std::size_t kFirstMergeGradients = 128;
constexpr std::size_t kFirstOptions = 2736;

bool flag(std::string_view argument, std::int32_t value) {
  if (value != 0 && value != 1) refuse_value(argument, value, "a flag must be 0 or 1", value < 0 ? "0" : "1");
  return value == 1;
}

void check_reserved(std::string_view argument, std::int32_t value) {
  if (value != 0) refuse_value(argument, value, "must be 0", "0");
}

/// `value` means something only with its flag, so that a forgotten flag does not go unnoticed.
template <class Value> void check_unused(std::string_view argument, const Value& value, std::string_view flag_name) {
  if (value != Value{0}) refuse_value(argument, value, text("is set without ", flag_name), text(flag_name, " = 1"));
}

DType dtype_from(std::string_view argument, narrows_dtype value) {
  if (value < narrows_fp16 || value > narrows_boolean)
    refuse_type(text(argument, ".dtype"), value, "must be a narrows_dtype, narrows_fp16 (1) to narrows_boolean (8)");
  return static_cast<DType>(value - narrows_fp16);
}

Tensor tensor_from(std::string_view argument, const narrows_tensor& given) {
  if (given.rank < 0 || given.rank > narrows_max_rank)
    refuse_value(text(argument, ".rank"), given.rank, "must be in [0, 5]", given.rank < 0 ? "0" : "5");
  check_reserved(text(argument, ".reserved"), given.reserved);
  const bool strided = flag(text(argument, ".has_strides"), given.has_strides);
  if (given.rank == 0) {
    if (given.data) refuse_value(text(argument, ".rank"), 0, "data is given, so the rank must be in [1, 5]", "1");
    return {};
  }
  Tensor tensor;
  tensor.data = given.data;
  tensor.dtype = dtype_from(argument, given.dtype);
  if (given.device_kind != narrows_cpu && given.device_kind != narrows_cuda)
    refuse_type(text(argument, ".device_kind"), given.device_kind, "must be narrows_cpu (0) or narrows_cuda (1)");
  tensor.device = {static_cast<DeviceKind>(given.device_kind), given.device_index};
  for (std::int32_t axis = 0; axis < given.rank; ++axis) {
    tensor.shape.push_back(given.shape[axis]);
    if (strided)
      tensor.strides.push_back(given.strides[axis]);
    else
      check_unused(text(argument, ".strides[", axis, "]"), given.strides[axis], text(argument, ".has_strides"));
  }
  return tensor;
}

Number number_from(std::string_view argument, std::uint64_t value, const narrows_tensor& tensor) {
  Number number(value);
  number.tensor = tensor_from(text(argument, "_tensor"), tensor);
  if (number.tensor.given() && value != 0)
    refuse_value(argument, std::to_string(value), text("must be 0 when ", argument, "_tensor is given"), "0");
  return number;
}

Causal causal_from(narrows_causal value) {
  if (value < narrows_causal_none || value > narrows_causal_top_left)
    refuse_value("causal", value,
                 "must be narrows_causal_none (0), narrows_causal_bottom_right (1) or narrows_causal_top_left (2)");
  return static_cast<Causal>(value);
}

void read_scores(Options& options, const narrows_options& given) {
  if (flag("has_scale", given.has_scale))
    options.scale = given.scale;
  else
    check_unused("scale", given.scale, "has_scale");
  options.softcap = given.softcap;
  options.alibi_slopes = tensor_from("alibi_slopes", given.alibi_slopes);
  options.bias = tensor_from("bias", given.bias);
  options.sinks = tensor_from("sinks", given.sinks);
}

void read_visibility(Options& options, const narrows_options& given) {
  options.causal = causal_from(given.causal);
  if (flag("has_window", given.has_window)) {
    options.window = {given.window_left, given.window_right};
  } else {
    check_unused("window_left", given.window_left, "has_window");
    check_unused("window_right", given.window_right, "has_window");
  }
  options.chunk = given.chunk;
  options.shift = tensor_from("shift", given.shift);
  options.mask = tensor_from("mask", given.mask);
  options.key_begin = tensor_from("key_begin", given.key_begin);
  options.key_end = tensor_from("key_end", given.key_end);
}

void read_dropout(Options& options, const narrows_options& given) {
  options.dropout = given.dropout;
  options.seed = number_from("seed", given.seed, given.seed_tensor);
  options.offset = number_from("offset", given.offset, given.offset_tensor);
  options.origin = {given.origin_b, given.origin_h, given.origin_i, given.origin_j, given.origin_H};
}

void read_lengths_and_cache(Options& options, const narrows_options& given) {
  options.cu_seqlens_q = tensor_from("cu_seqlens_q", given.cu_seqlens_q);
  options.cu_seqlens_k = tensor_from("cu_seqlens_k", given.cu_seqlens_k);
  options.seqused_q = tensor_from("seqused_q", given.seqused_q);
  options.seqused_k = tensor_from("seqused_k", given.seqused_k);
  options.cache_seqlens = tensor_from("cache_seqlens", given.cache_seqlens);
  options.block_table = tensor_from("block_table", given.block_table);
  options.cache_batch_idx = tensor_from("cache_batch_idx", given.cache_batch_idx);
  options.leftpad = tensor_from("leftpad", given.leftpad);
  options.k_new = tensor_from("k_new", given.k_new);
  options.v_new = tensor_from("v_new", given.v_new);
  options.cu_seqlens_k_new = tensor_from("cu_seqlens_k_new", given.cu_seqlens_k_new);
  options.rotary_cos = tensor_from("rotary_cos", given.rotary_cos);
  options.rotary_sin = tensor_from("rotary_sin", given.rotary_sin);
  options.rotary_base = tensor_from("rotary_base", given.rotary_base);
  options.rotary_interleaved = flag("rotary_interleaved", given.rotary_interleaved);
}

void read_method(Options& options, const narrows_options& given) {
  options.deterministic = flag("deterministic", given.deterministic);
  options.batch_invariant = flag("batch_invariant", given.batch_invariant);
  options.num_splits = given.num_splits;
  options.check = flag("check", given.check);
  options.threads = given.threads;
  options.workspace = tensor_from("workspace", given.workspace);
  options.status = tensor_from("status", given.status);
  if (given.family) options.family = given.family;
  options.stream = given.stream;
}

}  // namespace

Options options_from(const narrows_options* caller) {
  Options options;
  if (!caller) return options;
  const narrows_options given = read_struct(caller, "options", kFirstOptions);
  check_reserved("options.reserved", given.reserved);
  read_scores(options, given);
  read_visibility(options, given);
  read_dropout(options, given);
  read_lengths_and_cache(options, given);
  read_method(options, given);
  return options;
}

Inputs inputs_from(const narrows_inputs* caller) {
  const narrows_inputs given = read_struct(caller, "in", kFirstInputs);
  return {tensor_from("q", given.q), tensor_from("k", given.k), tensor_from("v", given.v)};
}

Outputs outputs_from(const narrows_outputs* caller) {
  const narrows_outputs given = read_struct(caller, "out", kFirstOutputs);
  return {tensor_from("o", given.o), tensor_from("lse", given.lse)};
}

BackwardInputs backward_inputs_from(const narrows_backward_inputs* caller) {
  const narrows_backward_inputs given = read_struct(caller, "in", kFirstBackwardInputs);
  return {tensor_from("q", given.q),      tensor_from("k", given.k),     tensor_from("v", given.v),
          tensor_from("o", given.o),      tensor_from("lse", given.lse), tensor_from("dout", given.dout),
          tensor_from("dlse", given.dlse)};
}

Gradients gradients_from(const narrows_gradients* caller) {
  const narrows_gradients given = read_struct(caller, "out", kFirstGradients);
  return {tensor_from("dq", given.dq),           tensor_from("dk", given.dk),
          tensor_from("dv", given.dv),           tensor_from("dbias", given.dbias),
          tensor_from("dslopes", given.dslopes), tensor_from("dsinks", given.dsinks)};
}

std::vector<Outputs> parts_from(std::string_view argument, const narrows_outputs* caller, std::size_t count) {
  std::vector<Outputs> parts;
  if (count == 0) return parts;
  if (!caller) refuse_value(argument, "NULL", "this argument is required");
  const std::size_t size = struct_size_of(caller);
  const auto* at = reinterpret_cast<const unsigned char*>(caller);
  for (std::size_t part = 0; part < count; ++part, at += size) {
    const std::string name = text(argument, "[", part, "]");
    if (struct_size_of(at) != size)
      refuse_value(name + ".struct_size", std::to_string(struct_size_of(at)), text("must be that of ", argument, "[0]"),
                   std::to_string(size));
    const narrows_outputs given = read_struct(reinterpret_cast<const narrows_outputs*>(at), name, kFirstOutputs);
    parts.push_back({tensor_from(name + ".o", given.o), tensor_from(name + ".lse", given.lse)});
  }
  return parts;
}

Tensor optional_tensor_from(std::string_view argument, const narrows_tensor* caller) {
  return caller ? tensor_from(argument, *caller) : Tensor{};
}

OwnedMergeGradients merge_gradients_from(const narrows_merge_gradients* caller, std::size_t count) {
  const narrows_merge_gradients given = read_struct(caller, "out", kFirstMergeGradients);
  OwnedMergeGradients owned;
  if (given.parts) owned.parts = parts_from("out.parts", given.parts, count);
  owned.gradients = {owned.parts, tensor_from("dsinks", given.dsinks)};
  return owned;
}

}  // namespace narrows::boundary
