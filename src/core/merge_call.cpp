#include "core/merge_call.hpp"

#include "core/tensors.hpp"

namespace narrows {
namespace {

/// What every o of a call must be, from the tensor that says it.
struct Shapes {
  std::string_view model;  // that tensor's name
  Dims o, lse;
  DType dtype;
  Device device;
  bool varlen;

  Shapes(std::string_view argument, const Tensor& o_)
      : model(argument), o(o_.shape), dtype(o_.dtype), device(o_.device), varlen(o_.shape.rank() == 3) {
    check_memory(argument, o_, o_.device, true);
    check_floating(argument, o_);
    const std::size_t rank = o.rank();
    if (rank != 3 && rank != 4)
      refuse_value(argument, text("shape ", o), "must have rank 4 (b, sq, h, dv) or 3 (total_q, h, dv)");
    if (o[rank - 1] < 1) refuse_value(argument, "head dim 0", "must be >= 1", "1");
    lse = varlen ? Dims{o[1], o[0]} : Dims{o[0], o[2], o[1]};
  }

  View o_view(std::string_view argument, const Tensor& tensor) const {
    check_memory(argument, tensor, device, true);
    check_dtype(argument, tensor, dtype, text("must be ", model, "'s dtype"));
    check_shape(argument, tensor, o, text(model, "'s shape"));
    return view_of(tensor, varlen ? kVarlen : kDense);
  }
  View lse_view(std::string_view argument, const Tensor& tensor) const {
    check_memory(argument, tensor, device, true);
    check_dtype(argument, tensor, accumulator(dtype), "must be fp32 (fp64 for fp64 inputs)");
    check_shape(argument, tensor, lse, varlen ? "(h, total_q)" : "(b, h, sq)");
    return view_of(tensor, varlen ? kVarlenLse : kDenseLse);
  }
  /// Tensors that are written; each may be left out.
  PartViews results(const std::string& name, const Outputs& out) const {
    PartViews views;
    if (out.o.given()) {
      views.o = o_view(name + "o", out.o);
      check_output_strides(name + "o", out.o);
    }
    if (out.lse.given()) {
      views.lse = lse_view(name + "lse", out.lse);
      check_output_strides(name + "lse", out.lse);
    }
    return views;
  }
};

std::string of_part(std::string_view argument, std::size_t part) { return text(argument, "[", part, "]."); }

MergeCall make_call(const Shapes& shapes, std::span<const Outputs> parts, const Tensor& sinks) {
  MergeCall call;
  call.device = shapes.device;
  call.dtype = shapes.dtype;
  const std::size_t rows = shapes.varlen ? 0 : 1;
  call.batch = shapes.varlen ? 1 : shapes.o[0];
  call.rows = shapes.o[rows];
  call.heads = shapes.o[rows + 1];
  call.value_dim = shapes.o[rows + 2];
  for (std::size_t part = 0; part < parts.size(); ++part) {
    const std::string name = of_part("parts", part);
    call.parts.push_back({shapes.o_view(name + "o", parts[part].o), shapes.lse_view(name + "lse", parts[part].lse)});
  }
  if (sinks.given()) {
    check_memory("sinks", sinks, shapes.device, true);
    check_floating("sinks", sinks);
    check_shape("sinks", sinks, Dims{call.heads}, "(h)");
    call.sinks = view_of(sinks, Axes{0, -1, -1, -1});
  }
  return call;
}

}  // namespace

MergeCall make_merge(std::span<const Outputs> parts, const Outputs& out, const Tensor& sinks) {
  const Shapes shapes("o", out.o);
  MergeCall call = make_call(shapes, parts, sinks);
  call.out = shapes.results("", out);
  return call;
}

MergeCall make_merge_backward(std::span<const Outputs> parts, const Tensor& dout, const Tensor& dlse,
                              const MergeGradients& out, const Tensor& sinks) {
  const Shapes shapes("dout", dout);
  MergeCall call = make_call(shapes, parts, sinks);
  call.dout = shapes.o_view("dout", dout);
  if (dlse.given()) call.dlse = shapes.lse_view("dlse", dlse);
  if (!out.parts.empty() && out.parts.size() != parts.size())
    refuse_value("out.parts", text(out.parts.size(), " parts"), "must be as many as parts, or none",
                 to_text(parts.size()));
  std::vector<Other> others{{"an input", &dout}, {"an input", &dlse}, {"an input", &sinks}};
  for (const Outputs& part : parts) others.insert(others.end(), {{"an input", &part.o}, {"an input", &part.lse}});
  const auto apart = [&](const std::string& argument, const Tensor& result) {
    if (result.given()) check_apart(argument, result, others);
    others.push_back({"another result", &result});
  };
  for (std::size_t part = 0; part < out.parts.size(); ++part) {
    const std::string name = of_part("out.parts", part);
    call.gradients.push_back(shapes.results(name, out.parts[part]));
    apart(name + "o", out.parts[part].o);
    apart(name + "lse", out.parts[part].lse);
  }
  if (out.dsinks.given()) {
    if (!sinks.given()) refuse_value("dsinks", "given", "needs sinks");
    check_memory("dsinks", out.dsinks, shapes.device, true);
    check_dtype("dsinks", out.dsinks, sinks.dtype, "must be sinks's dtype");
    check_shape("dsinks", out.dsinks, sinks.shape, "sinks's shape");
    check_output_strides("dsinks", out.dsinks);
    apart("dsinks", out.dsinks);
    call.dsinks = view_of(out.dsinks, Axes{0, -1, -1, -1});
  }
  return call;
}

}  // namespace narrows
