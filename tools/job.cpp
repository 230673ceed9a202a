#include "tools/job.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "core/error.hpp"
#include "cpu/reference_numbers.hpp"
#include "tools/files/layout.hpp"

namespace narrows::cli {
namespace {

/// Row-major memory for a tensor of this shape; `order` is that of its axes in the file.
Result new_result(const Job& job, const char* name, DType dtype, Dims shape, AxisOrder order = AxisOrder::bshd) {
  const bool heads_first = order == AxisOrder::bhsd;
  const std::size_t rank = shape.rank();
  if (heads_first) std::swap(shape[rank - 3], shape[rank - 2]);
  const std::string full = full_name(job.call.prefix, name);
  const files::Memory memory = files::allocate(full, static_cast<std::size_t>(files::dense_bytes(full, shape, dtype)));
  std::memset(memory.bytes.data(), 0xFF, memory.bytes.size());  // NaN: what is not written shows
  const Tensor tensor{memory.bytes.data(), dtype, shape, files::row_major_strides(shape), Device{}};
  return {name,
          heads_first ? exchanged(tensor) : tensor,
          {full, dtype, shape, files::row_major_strides(shape), memory.bytes, memory.owner}};
}

/// A copy of a cache, which the call then appends to; files are mapped read-only.
Result grown(const Job& job, const char* name, Tensor& cache, AxisOrder order) {
  const Tensor in_file = order == AxisOrder::bhsd ? exchanged(cache) : cache;
  const auto bytes = static_cast<std::size_t>(files::dense_bytes(name, in_file.shape, in_file.dtype));
  const files::Array whole{
      name,   in_file.dtype, in_file.shape, in_file.strides, {static_cast<const std::byte*>(in_file.data), bytes},
      nullptr};
  Result result = new_result(job, name, cache.dtype, cache.shape, order);
  const files::Array dense = files::packed(name, whole);
  std::copy(dense.bytes.begin(), dense.bytes.end(), static_cast<std::byte*>(result.tensor.data));
  cache = result.tensor;
  return result;
}

const Tensor& tensor_of(const std::vector<Result>& results, std::string_view name) {
  static const Tensor none;
  const auto found = std::find_if(results.begin(), results.end(), [&](const auto& r) { return r.name == name; });
  return found == results.end() ? none : found->tensor;
}

Outputs outputs_of(const std::vector<Result>& results) { return {tensor_of(results, "o"), tensor_of(results, "lse")}; }

BackwardInputs backward_inputs(const Job& job) {
  const Inputs& in = job.call.in;
  const Outputs saved = outputs_of(job.saved);
  const Tensor& dout = job.call.dout.given() ? job.call.dout : tensor_of(job.saved, "dout");
  return {in.q, in.k, in.v, saved.o, saved.lse, dout, job.call.dlse};
}

Gradients gradients_of(const std::vector<Result>& results) {
  return {tensor_of(results, "dq"),    tensor_of(results, "dk"),      tensor_of(results, "dv"),
          tensor_of(results, "dbias"), tensor_of(results, "dslopes"), tensor_of(results, "dsinks")};
}

std::vector<Result> forward_results(const Job& job, AxisOrder order) {
  Dims o = job.call.in.q.shape;
  const std::size_t rank = o.rank();
  o[rank - 1] = job.problem.value_dim;
  const Dims lse = rank == 3 ? Dims{o[1], o[0]} : Dims{o[0], o[2], o[1]};
  std::vector<Result> results;
  results.push_back(new_result(job, "o", job.problem.dtype, o, order));
  results.push_back(new_result(job, "lse", accumulator(job.problem.dtype), lse));
  return results;
}

std::vector<Result> backward_results(const Job& job, AxisOrder order) {
  std::vector<Result> results;
  const auto add = [&](const char* name, const Tensor& of, AxisOrder axes) {
    if (of.given()) results.push_back(new_result(job, name, of.dtype, of.shape, axes));
  };
  add("dq", job.call.in.q, order);
  add("dk", job.call.in.k, order);
  add("dv", job.call.in.v, order);
  add("dbias", job.call.options.bias, AxisOrder::bshd);
  add("dslopes", job.call.options.alibi_slopes, AxisOrder::bshd);
  add("dsinks", job.call.options.sinks, AxisOrder::bshd);
  return results;
}

/// SplitMix64 of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
std::uint64_t split_mix(std::uint64_t& state) {
  std::uint64_t x = state += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

/// Uniform in [-1, 1), in the row-major order of (b, sq, h, dv) whatever the file's order is.
void generate(const Tensor& dout, std::uint64_t seed) {
  const reference::View view(dout);
  const reference::Index count = reference::elements(dout.shape);
  Dims at = reference::first_of(dout.shape);
  for (reference::Index element = 0; element < count; ++element, reference::advance(at, dout.shape))
    view.set_element(at, static_cast<double>(split_mix(seed) >> 11) * 0x1p-52 - 1);
}

void prepare_forward(Job& job, AxisOrder order) {
  job.results = forward_results(job, order);
  if (!job.problem.appends) return;
  job.results.push_back(grown(job, "k", job.call.in.k, order));
  job.results.push_back(grown(job, "v", job.call.in.v, order));
}

void prepare_backward(Job& job, const Reading& reading) {
  job.saved = forward_results(job, reading.order);
  if (!job.call.dout.given()) {
    const Tensor& o = job.saved.front().tensor;
    job.saved.push_back(new_result(job, "dout", o.dtype, o.shape, reading.order));
    generate(job.saved.back().tensor, reading.dout_seed.value_or(0));
  } else if (reading.dout_seed) {
    refuse_value("--dout-seed", std::to_string(*reading.dout_seed), "the file holds dout");
  }
  job.results = backward_results(job, reading.order);
  const Call call = make_backward(backward_inputs(job), gradients_of(job.results), job.call.options);
  job.problem = call.problem;
  job.work = work(call);
}

const Tensor& ours(const Job& job, std::string_view name) {
  const Tensor& result = tensor_of(job.results, name);
  return result.given() ? result : tensor_of(job.saved, name);
}

void check_own(const Job& job) {
  for (const NamedTensor& own : job.call.own) {
    const Tensor& result = ours(job, own.name);
    if (!result.given())
      refuse_value(own.name, "in the file", "this call has no such gradient; --ignore leaves it out");
    if (own.tensor.shape != result.shape)
      refuse_value(own.name, text("shape ", own.tensor.shape),
                   text("the file's own must have the shape of the result, ", result.shape));
  }
}

Difference compared(std::string name, const Tensor& ours, const Tensor& theirs) {
  const reference::View a(ours), b(theirs);
  Difference difference{std::move(name), 0};
  const reference::Index count = reference::elements(ours.shape);
  Dims at = reference::first_of(ours.shape);
  for (reference::Index element = 0; element < count; ++element, reference::advance(at, ours.shape)) {
    const double x = a.element(at), y = b.element(at);
    if (x == y || (std::isnan(x) && std::isnan(y))) continue;
    const double distance = std::abs(x - y);
    difference.largest =
        std::max(difference.largest, std::isnan(distance) ? std::numeric_limits<double>::infinity() : distance);
  }
  return difference;
}

}  // namespace

double Job::seconds() const {
  if (gpu) return gpu->seconds();
  const Outputs out = outputs_of(results);
  const Gradients gradients = gradients_of(results);
  const BackwardInputs in = backward_inputs(*this);
  const auto begin = std::chrono::steady_clock::now();
  if (backward)
    narrows::backward(in, gradients, call.options);
  else
    forward(call.in, out, call.options);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void Job::fetch() const {
  if (gpu) gpu->fetch();
}

std::vector<Verdict> Job::check() const {
  return backward ? check_backward(backward_inputs(*this), gradients_of(results), call.options)
                  : check_forward(call.in, outputs_of(results), call.options);
}

std::vector<Difference> Job::differences() const {
  std::vector<Difference> differences;
  for (const NamedTensor& own : call.own) differences.push_back(compared(own.name, ours(*this, own.name), own.tensor));
  return differences;
}

Job prepared(FileCall call, const Reading& reading) {
  Job job;
  job.call = std::move(call);
  job.backward = reading.backward;
  in_the_name_of(job.label(), [&] {
    const Inputs& in = job.call.in;
    const Options& options = job.call.options;
    const Call checked = job.backward ? make_explained_backward(in, options) : make_explained(in, options);
    job.problem = checked.problem;
    job.work = work(checked);
    if (job.backward)
      prepare_backward(job, reading);
    else
      prepare_forward(job, reading.order);
    check_own(job);
  });
  return job;
}

void move_to(Job& job, const Device& device) {
  if (device.kind == DeviceKind::cpu) return;
  in_the_name_of(job.label(), [&] {
    if (job.problem.appends)
      throw Error(ErrorCode::not_implemented, text("--device: ", device, ": new keys are for the CPU as yet"));
    job.gpu = job.backward
                  ? std::make_shared<GpuCall>(job.call, backward_inputs(job), gradients_of(job.results), device)
                  : std::make_shared<GpuCall>(job.call, outputs_of(job.results), device);
    job.problem.device = device;
  });
}

void save_forward(const Job& job) {
  if (job.backward && !job.gpu)
    in_the_name_of(job.label(), [&] { forward(job.call.in, outputs_of(job.saved), job.call.options); });
}

}  // namespace narrows::cli
