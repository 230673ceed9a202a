#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <tuple>

#include "call.hpp"
#include "cuda/driver.hpp"
#include "dlpack.hpp"
#include "merge.hpp"

namespace narrows::python {
namespace {

PyObject* exception_type(ErrorCode code) {
  switch (code) {
    case ErrorCode::invalid_value:
    case ErrorCode::invalid_file: return PyExc_ValueError;
    case ErrorCode::invalid_type: return PyExc_TypeError;
    case ErrorCode::not_implemented: return PyExc_NotImplementedError;
    case ErrorCode::out_of_memory: return PyExc_MemoryError;
    case ErrorCode::internal: return PyExc_RuntimeError;
  }
  return PyExc_RuntimeError;
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    PyErr_SetString(exception_type(error.code()), error.what());
  }
}

nb::dlpack::dtype dlpack_dtype(std::string_view name) {
  const auto make = [](std::uint8_t code, std::uint8_t bits) { return nb::dlpack::dtype{code, bits, 1}; };
  if (name == "fp16") return make(dlpack::kFloat, 16);
  if (name == "bf16") return make(dlpack::kBfloat, 16);
  if (name == "fp32") return make(dlpack::kFloat, 32);
  if (name == "fp64") return make(dlpack::kFloat, 64);
  throw Error(ErrorCode::internal, "no result has dtype " + std::string(name));
}

void* new_on_cpu(std::size_t bytes) {
  constexpr std::size_t kAlignment = 64;  // what libraries ask for before they adopt memory without a copy
  const std::size_t rounded = std::max((bytes + kAlignment - 1) / kAlignment, std::size_t{1}) * kAlignment;
  void* data = std::aligned_alloc(kAlignment, rounded);
  if (!data) throw std::bad_alloc();
  return data;
}

/// Of a device: there for every stream when this is made.
class GpuMemory {
 public:
  GpuMemory(std::size_t bytes, int device) : device_(device) {
    const cuda::CurrentDevice current(device);
    memory_.emplace(static_cast<std::int64_t>(bytes), nullptr);
    cuda::synchronise(nullptr);
  }
  ~GpuMemory() {
    const cuda::CurrentDevice current(device_);
    memory_.reset();
  }
  void* data() const { return memory_->data(); }

 private:
  int device_;
  std::optional<cuda::DeviceMemory> memory_;
};

// Uninitialised memory that other libraries take over through DLPack; NumPy has no bfloat16 of its own to allocate.
nb::ndarray<nb::array_api> empty(const std::vector<std::int64_t>& shape, std::string_view dtype_name,
                                 std::optional<int> device) {
  const nb::dlpack::dtype dtype = dlpack_dtype(dtype_name);
  std::size_t bytes = dtype.bits / 8U;
  std::vector<std::size_t> sizes;
  for (const std::int64_t size : shape) {
    sizes.push_back(static_cast<std::size_t>(size));
    if (__builtin_mul_overflow(bytes, sizes.back(), &bytes) || bytes > PTRDIFF_MAX) throw std::bad_alloc();
  }
  if (device) {
    auto memory = std::make_unique<GpuMemory>(bytes, *device);
    void* const data = memory->data();
    const nb::capsule owner(memory.release(), [](void* pointer) noexcept { delete static_cast<GpuMemory*>(pointer); });
    return nb::ndarray<nb::array_api>(data, sizes.size(), sizes.data(), owner, nullptr, dtype, nb::device::cuda::value,
                                      *device);
  }
  void* const data = new_on_cpu(bytes);
  const nb::capsule owner(data, [](void* pointer) noexcept { std::free(pointer); });
  return nb::ndarray<nb::array_api>(data, sizes.size(), sizes.data(), owner, nullptr, dtype, nb::device::cpu::value, 0);
}

void synchronise(int device, std::uintptr_t stream) {
  const cuda::CurrentDevice current(device);
  cuda::synchronise(reinterpret_cast<cuda::Stream>(stream));
}

void bind_operand(nb::module_& module) {
  nb::class_<Operand>(module, "Operand")
      .def_static(
          "from_buffer",
          [](std::string name, nb::object array, std::string_view dtype, bool writable) {
            return Operand::from_buffer(std::move(name), array, dtype, writable ? Access::write : Access::read);
          },
          nb::arg("name"), nb::arg("array"), nb::arg("dtype"), nb::arg("writable"))
      .def_static(
          "from_dlpack",
          [](std::string name, nb::object array, bool writable, std::optional<std::uintptr_t> stream) {
            return Operand::from_dlpack(std::move(name), array, writable ? Access::write : Access::read, stream);
          },
          nb::arg("name"), nb::arg("array"), nb::arg("writable"), nb::arg("stream").none())
      .def_static(
          "from_address",
          [](std::string name, std::uintptr_t address, std::string_view dtype, std::vector<std::int64_t> shape,
             std::vector<std::int64_t> strides, std::optional<int> device, nb::object owner) {
            const Device where = device ? Device{DeviceKind::cuda, *device} : Device{};
            return Operand::from_address(std::move(name), address, dtype, std::move(shape), std::move(strides), where,
                                         std::move(owner));
          },
          nb::arg("name"), nb::arg("address"), nb::arg("dtype"), nb::arg("shape"), nb::arg("strides"),
          nb::arg("device").none(), nb::arg("owner"))
      .def_prop_ro("name", &Operand::name)
      .def_prop_ro("dtype", [](const Operand& operand) { return name(operand.dtype()); })
      .def_prop_ro("shape", [](const Operand& operand) { return nb::tuple(nb::cast(operand.shape())); })
      .def("fold_leading", &Operand::fold_leading, nb::arg("leading"), nb::arg("keep"), nb::arg("broadcast"));
}

template <class T, T Options::*member> void option(nb::class_<Call>& call, const char* name) {
  call.def_prop_rw(
      name, [](Call& self) { return self.options().*member; },
      [](Call& self, T value) { self.options().*member = value; });
}

void bind_call(nb::module_& module) {
  using Pair = std::tuple<std::int64_t, std::int64_t>;
  using Five = std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;
  nb::class_<Call> call(module, "Call");
  call.def(nb::init<>())
      .def("set_operand", &Call::set_operand, nb::arg("operand"))
      .def("set_number", &Call::set_number, nb::arg("name"), nb::arg("value"))
      .def("set_family", &Call::set_family, nb::arg("name"))
      .def(
          "set_causal", [](Call& self, Causal causal) { self.options().causal = causal; }, nb::arg("causal"))
      .def(
          "set_window",
          [](Call& self, Pair window) {
            self.options().window = {std::get<0>(window), std::get<1>(window)};
          },
          nb::arg("window"))
      .def(
          "set_origin",
          [](Call& self, Five origin) {
            self.options().origin = std::apply([](auto... parts) { return Origin{parts...}; }, origin);
          },
          nb::arg("origin"))
      .def("forward", &Call::forward, nb::call_guard<nb::gil_scoped_release>())
      .def("prepare", &Call::prepare, nb::call_guard<nb::gil_scoped_release>())
      .def("prepare_backward", &Call::prepare_backward, nb::call_guard<nb::gil_scoped_release>())
      .def("backward", &Call::backward, nb::call_guard<nb::gil_scoped_release>())
      .def("workspace_size", &Call::workspace_size, nb::call_guard<nb::gil_scoped_release>())
      .def("backward_workspace_size", &Call::backward_workspace_size, nb::call_guard<nb::gil_scoped_release>())
      .def("explain", &Call::explain, nb::call_guard<nb::gil_scoped_release>());
  option<std::optional<double>, &Options::scale>(call, "scale");
  option<double, &Options::softcap>(call, "softcap");
  option<double, &Options::dropout>(call, "dropout");
  option<std::int64_t, &Options::chunk>(call, "chunk");
  option<bool, &Options::rotary_interleaved>(call, "rotary_interleaved");
  option<bool, &Options::deterministic>(call, "deterministic");
  option<bool, &Options::batch_invariant>(call, "batch_invariant");
  option<bool, &Options::check>(call, "check");
  option<int, &Options::num_splits>(call, "num_splits");
  option<int, &Options::threads>(call, "threads");
  call.def_prop_rw(
      "stream", [](Call& self) { return reinterpret_cast<std::uintptr_t>(self.options().stream); },
      [](Call& self, std::uintptr_t value) { self.options().stream = reinterpret_cast<void*>(value); });
}

void bind_explanation(nb::module_& module) {
  nb::class_<Explanation>(module, "Explanation")
      .def_ro("problem", &Explanation::problem)
      .def_ro("family", &Explanation::family)
      .def_ro("plan", &Explanation::plan)
      .def_ro("refused", &Explanation::refused)
      .def_ro("visible_pairs", &Explanation::visible_pairs)
      .def_ro("flops", &Explanation::flops)
      .def_ro("fused_bytes", &Explanation::fused_bytes)
      .def_ro("three_kernel_bytes", &Explanation::three_kernel_bytes)
      .def_ro("fused_memory", &Explanation::fused_memory)
      .def_ro("three_kernel_memory", &Explanation::three_kernel_memory)
      .def_ro("fused_intensity", &Explanation::fused_intensity)
      .def_ro("three_kernel_intensity", &Explanation::three_kernel_intensity)
      .def_ro("predicted_seconds", &Explanation::predicted_seconds)
      .def_ro("three_kernel_seconds", &Explanation::three_kernel_seconds)
      .def_ro("limited_by", &Explanation::limited_by)
      .def_ro("fused_l2_bytes", &Explanation::fused_l2_bytes)
      .def("__str__", &Explanation::text);
}

void bind_info(nb::module_& module) {
  nb::class_<FamilyInfo>(module, "FamilyInfo")
      .def_ro("name", &FamilyInfo::name)
      .def_ro("available", &FamilyInfo::available)
      .def_ro("detail", &FamilyInfo::detail);
  nb::class_<Info>(module, "Info")
      .def_ro("version", &Info::version)
      .def_ro("cpu", &Info::cpu)
      .def_ro("instruction_set", &Info::instruction_set)
      .def_ro("threads", &Info::threads)
      .def_ro("families", &Info::families)
      .def("__str__", [](const Info& self) {
        std::string text = "narrows " + self.version + "\ncpu: " + self.cpu +
                           "\ninstruction set: " + self.instruction_set + "\nthreads: " + std::to_string(self.threads);
        for (const FamilyInfo& family : self.families)
          text += "\nfamily " + family.name + (family.available ? ": " : " (not available): ") + family.detail;
        return text;
      });
}

}  // namespace
}  // namespace narrows::python

NB_MODULE(_core, module) {
  using namespace narrows::python;
  nb::register_exception_translator(translate);
  nb::enum_<narrows::Causal>(module, "Causal")
      .value("none", narrows::Causal::none)
      .value("bottom_right", narrows::Causal::bottom_right)
      .value("top_left", narrows::Causal::top_left);
  bind_operand(module);
  bind_call(module);
  bind_explanation(module);
  bind_info(module);
  module.def("merge", &merge, nb::arg("parts"), nb::arg("out"), nb::arg("sinks").none(), nb::arg("stream"));
  module.def("merge_backward", &merge_backward, nb::arg("parts"), nb::arg("dout"), nb::arg("dlse").none(),
             nb::arg("gradients"), nb::arg("sinks").none(), nb::arg("dsinks").none(), nb::arg("stream"));
  module.def("empty", &empty, nb::arg("shape"), nb::arg("dtype"), nb::arg("device") = nb::none());
  module.def("synchronise", &synchronise, nb::arg("device"), nb::arg("stream"),
             nb::call_guard<nb::gil_scoped_release>());
  module.def("info", &narrows::info);
  module.def("version", &narrows::version);
}
