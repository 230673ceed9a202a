#include "core/calls.hpp"

#include "core/cache.hpp"

namespace narrows {
namespace {

/// What a result must stay clear of: the inputs, and the results before it.
class Neighbours {
 public:
  Neighbours(const Inputs& in, const Options& options) {
    for (const Tensor* input : {&in.q, &in.k, &in.v, &options.bias, &options.mask, &options.alibi_slopes,
                                &options.sinks, &options.key_begin, &options.key_end, &options.k_new, &options.v_new})
      add("an input", *input);
  }
  void add(std::string_view name, const Tensor& tensor) { others_[count_++] = {name, &tensor}; }
  std::span<const Other> all() const { return std::span(others_).first(count_); }

 private:
  std::array<Other, 24> others_;
  std::size_t count_ = 0;
};

/// A writable tensor of a known shape.
struct Result {
  std::string_view argument;
  const Tensor& tensor;
  Dims shape;
  std::string_view named;  // the shape in words
  DType dtype;
  std::string_view dtype_rule;
};

void check_result(const Result& result, const Device& device, Neighbours& neighbours) {
  const Tensor& tensor = result.tensor;
  check_memory(result.argument, tensor, device, true);
  check_dtype(result.argument, tensor, result.dtype, result.dtype_rule);
  check_shape(result.argument, tensor, result.shape, result.named);
  check_output_strides(result.argument, tensor);
  check_apart(result.argument, tensor, neighbours.all());
  neighbours.add(result.argument, tensor);
}

Dims o_shape(const Tensor& q, i64 value_dim) {
  Dims shape = q.shape;
  shape[shape.rank() - 1] = value_dim;
  return shape;
}

Dims lse_shape(const Problem& problem) {
  if (problem.query_form == QueryForm::varlen) return {problem.heads, problem.query_rows};
  return {problem.batch, problem.heads, problem.query_rows};
}

std::string_view o_name(const Problem& problem) {
  return problem.query_form == QueryForm::varlen ? "(total_q, h, dv)" : "(b, sq, h, dv)";
}

std::string_view lse_name(const Problem& problem) {
  return problem.query_form == QueryForm::varlen ? "(h, total_q)" : "(b, h, sq)";
}

constexpr std::string_view kLseDType = "must be fp32 (fp64 for fp64 inputs)";

/// o, lse, dout, dlse of a backward call.
void check_saved(Call& call, const BackwardInputs& in) {
  Problem& problem = call.problem;
  const auto check = [&](std::string_view argument, const Tensor& tensor, bool per_row) {
    check_memory(argument, tensor, in.q.device, true);
    check_dtype(argument, tensor, per_row ? accumulator(problem.dtype) : problem.dtype,
                per_row ? kLseDType : "must be q's dtype");
    check_shape(argument, tensor, per_row ? lse_shape(problem) : o_shape(in.q, problem.value_dim),
                per_row ? lse_name(problem) : o_name(problem));
    return view_of(tensor, per_row ? lse_axes(problem) : query_axes(problem));
  };
  call.buffers.o = check("o", in.o, false);
  call.buffers.lse = check("lse", in.lse, true);
  call.buffers.dout = check("dout", in.dout, false);
  if (in.dlse.given()) call.buffers.dlse = check("dlse", in.dlse, true);
  problem.o = layout_of(in.o);
  problem.lse = layout_of(in.lse);
  problem.dout = layout_of(in.dout);
}

std::array<i64, 4> bias_sizes(const Dims& shape) {
  std::array<i64, 4> sizes{1, 1, 1, 1};
  for (std::size_t axis = 0, missing = 4 - shape.rank(); axis < shape.rank(); ++axis)
    sizes[missing + axis] = shape[axis];
  return sizes;
}

void refuse_cache(const Options& options) {
  if (is_cache_call(options)) refuse_value("backward", "a cache call", "cache calls are forward only");
}

}  // namespace

Call make_explained(const Inputs& in, const Options& options) { return check_call(in, options, false); }

Call make_explained_backward(const Inputs& in, const Options& options) {
  refuse_cache(options);
  Call call = check_call(in, options, false);
  Problem& problem = call.problem;
  problem.operation = Operation::backward;
  problem.wants_dq = problem.wants_dk = problem.wants_dv = true;
  problem.wants_dbias = options.bias.given();
  if (problem.wants_dbias) problem.dbias_sizes = bias_sizes(options.bias.shape);
  problem.wants_dslopes = options.alibi_slopes.given();
  problem.dslopes_per_batch = options.alibi_slopes.shape.rank() == 2;
  problem.wants_dsinks = options.sinks.given();
  return call;
}

Call make_forward(const Inputs& in, const Outputs& out, const Options& options) {
  Call call = check_call(in, options, true);
  Problem& problem = call.problem;
  Neighbours neighbours(in, options);
  check_result({"o", out.o, o_shape(in.q, problem.value_dim), o_name(problem), problem.dtype, "must be q's dtype"},
               problem.device, neighbours);
  call.buffers.o = view_of(out.o, query_axes(problem));
  problem.o = layout_of(out.o);
  if (out.lse.given()) {
    check_result({"lse", out.lse, lse_shape(problem), lse_name(problem), accumulator(problem.dtype), kLseDType},
                 problem.device, neighbours);
    call.buffers.lse = view_of(out.lse, lse_axes(problem));
    problem.lse = layout_of(out.lse);
    problem.wants_lse = true;
  }
  if (problem.appends) {
    check_output_strides("k", in.k);
    check_output_strides("v", in.v);
  }
  return call;
}

Call make_backward(const BackwardInputs& in, const Gradients& out, const Options& options) {
  const Inputs inputs{in.q, in.k, in.v};
  refuse_cache(options);
  Call call = check_call(inputs, options, true);
  Problem& problem = call.problem;
  Buffers& buffers = call.buffers;
  problem.operation = Operation::backward;
  check_saved(call, in);
  Neighbours neighbours(inputs, options);
  for (const Tensor* saved : {&in.o, &in.lse, &in.dout, &in.dlse}) neighbours.add("an input", *saved);
  // Literals: a run with a workspace allocates nothing, texts of rules it keeps included.
  struct Source {
    std::string_view name, shape, dtype;
  };
  const auto wanted = [&](std::string_view argument, const Tensor& gradient, const Tensor& of, const Source& source) {
    if (!gradient.given()) return false;
    if (!of.given()) refuse_value(argument, "given", text("needs ", source.name));
    check_result({argument, gradient, of.shape, source.shape, of.dtype, source.dtype}, problem.device, neighbours);
    return true;
  };
  problem.wants_dq = wanted("dq", out.dq, in.q, {"q", "q's shape", "must be q's dtype"});
  problem.wants_dk = wanted("dk", out.dk, in.k, {"k", "k's shape", "must be k's dtype"});
  problem.wants_dv = wanted("dv", out.dv, in.v, {"v", "v's shape", "must be v's dtype"});
  problem.wants_dbias = wanted("dbias", out.dbias, options.bias, {"bias", "bias's shape", "must be bias's dtype"});
  problem.wants_dslopes = wanted("dslopes", out.dslopes, options.alibi_slopes,
                                 {"alibi_slopes", "alibi_slopes's shape", "must be alibi_slopes's dtype"});
  problem.wants_dsinks =
      wanted("dsinks", out.dsinks, options.sinks, {"sinks", "sinks's shape", "must be sinks's dtype"});
  const auto placed = [](bool wants, const Tensor& gradient, const Axes& axes, View& view, Layout& layout) {
    if (!wants) return;
    view = view_of(gradient, axes);
    layout = layout_of(gradient);
  };
  placed(problem.wants_dq, out.dq, query_axes(problem), buffers.dq, problem.dq);
  placed(problem.wants_dk, out.dk, key_axes(problem), buffers.dk, problem.dk);
  placed(problem.wants_dv, out.dv, key_axes(problem), buffers.dv, problem.dv);
  if (problem.wants_dbias) {
    buffers.dbias = broadcast_view(out.dbias);
    problem.dbias_sizes = bias_sizes(out.dbias.shape);
  }
  problem.dslopes_per_batch = problem.wants_dslopes && out.dslopes.shape.rank() == 2;
  if (problem.wants_dslopes) buffers.dslopes = view_of(out.dslopes, slope_axes(out.dslopes));
  if (problem.wants_dsinks) buffers.dsinks = view_of(out.dsinks, Axes{0, -1, -1, -1});
  return call;
}

}  // namespace narrows
