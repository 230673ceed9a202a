#include "operand.hpp"

#include <algorithm>
#include <cstddef>
#include <optional>

#include "core/error.hpp"
#include "dlpack.hpp"

namespace narrows::python {
namespace {

constexpr std::string_view kDTypeRule = "must be float16, bfloat16, float32, float64, int32, int64, uint8 or bool";
constexpr std::string_view kWriteRule = "must be memory that can be written";

// ------------------------------------------------------------------------------------------------------ buffer protocol

std::optional<DType> dtype_of_format(std::string_view format, std::size_t item_bytes) {
  if (!format.empty() && (format[0] == '@' || format[0] == '=' || format[0] == '<')) format.remove_prefix(1);
  if (format.size() != 1) return std::nullopt;
  switch (format[0]) {
    case 'e': return DType::fp16;
    case 'f': return DType::fp32;
    case 'd': return DType::fp64;
    case 'B': return DType::uint8;
    case '?': return DType::boolean;
    case 'i':
    case 'l':
    case 'q': return item_bytes == 4 ? DType::int32 : DType::int64;
    default: return std::nullopt;
  }
}

std::string dtype_attribute(nb::handle array) { return nb::str(nb::getattr(array, "dtype", nb::str("?"))).c_str(); }

DType dtype_of_buffer(const std::string& name, const Py_buffer& buffer, std::string_view override, nb::handle array) {
  const std::string_view format = buffer.format ? buffer.format : "B";
  if (override == "bf16" && buffer.itemsize == 2) return DType::bf16;
  const std::optional<DType> dtype = dtype_of_format(format, static_cast<std::size_t>(buffer.itemsize));
  if (dtype && override.empty()) return *dtype;
  if (format[0] == '>' || format[0] == '!') {
    refuse_type(name, "dtype " + dtype_attribute(array), "must be in this machine's byte order",
                text(name, ".astype(", name, ".dtype.newbyteorder('='))"));
  }
  refuse_type(name, "dtype " + dtype_attribute(array), kDTypeRule);
}

// --------------------------------------------------------------------------------------------------------------- DLPack

Device device_of(const std::string& name, nb::handle array) {
  if (!nb::hasattr(array, "__dlpack_device__")) return {};
  const nb::object device = array.attr("__dlpack_device__")();
  const long type = nb::cast<long>(nb::int_(device[0]));
  const long index = nb::cast<long>(nb::int_(device[1]));
  if (type == dlpack::kCpu || type == dlpack::kCudaHost || type == dlpack::kRocmHost) return {};
  if (type == dlpack::kCuda) return {DeviceKind::cuda, static_cast<int>(index)};
  refuse(ErrorCode::not_implemented, name, text("device DLPack type ", type, ":", index),
         "memory must be the CPU's or a CUDA device's; move it there first");
}

nb::object export_capsule(nb::handle array, std::optional<std::uintptr_t> stream) {
  const nb::object method = array.attr("__dlpack__");
  nb::dict options;
  if (stream) options["stream"] = *stream;
  nb::dict with_version = nb::borrow<nb::dict>(options.attr("copy")());
  with_version["max_version"] = nb::make_tuple(dlpack::kMajor, 0);
  try {
    return method(**with_version);
  } catch (nb::python_error& error) {
    if (!error.matches(PyExc_TypeError)) throw;  // a TypeError: an exporter from before DLPack 1.0 knows no max_version
  }
  return method(**options);
}

struct Imported {
  dlpack::DLTensor tensor{};
  bool read_only = false;
  std::shared_ptr<void> owner;
};

// A capsule is consumed once: renaming it passes the duty of calling the deleter to us.
template <class M> M* consume(nb::handle capsule, const char* name, const char* used_name) {
  M* managed = static_cast<M*>(PyCapsule_GetPointer(capsule.ptr(), name));
  if (!managed || PyCapsule_SetName(capsule.ptr(), used_name) != 0) throw nb::python_error();
  return managed;
}

template <class M> std::shared_ptr<void> own(M* managed) {
  return {managed, [](void* pointer) {
            const nb::error_scope pending;  // a deleter may run Python code, and this may be on the way out of an error
            M* held = static_cast<M*>(pointer);
            if (held->deleter) held->deleter(held);
          }};
}

Imported import_capsule(const std::string& name, nb::handle capsule) {
  Imported result;
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    auto* managed = consume<dlpack::ManagedVersioned>(capsule, "dltensor_versioned", "used_dltensor_versioned");
    result.owner = own(managed);
    if (managed->major != dlpack::kMajor) {
      refuse_type(name, text("DLPack ", managed->major, ".", managed->minor), "must be 1.x or older");
    }
    result.read_only = (managed->flags & dlpack::kReadOnly) != 0;
    result.tensor = managed->tensor;
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    auto* managed = consume<dlpack::Managed>(capsule, "dltensor", "used_dltensor");
    result.owner = own(managed);
    result.tensor = managed->tensor;
  } else {
    refuse_type(name, "__dlpack__()", "must return an unused DLPack capsule");
  }
  return result;
}

DType dtype_of_dlpack(const std::string& name, const dlpack::DLTensor& tensor) {
  const int code = tensor.type_code;
  const int bits = tensor.type_bits;
  if (tensor.type_lanes == 1) {
    if (code == dlpack::kFloat && bits == 16) return DType::fp16;
    if (code == dlpack::kBfloat && bits == 16) return DType::bf16;
    if (code == dlpack::kFloat && bits == 32) return DType::fp32;
    if (code == dlpack::kFloat && bits == 64) return DType::fp64;
    if (code == dlpack::kInt && bits == 32) return DType::int32;
    if (code == dlpack::kInt && bits == 64) return DType::int64;
    if (code == dlpack::kUInt && bits == 8) return DType::uint8;
    if (code == dlpack::kBool && bits == 8) return DType::boolean;
  }
  const bool is_fp8 = code >= dlpack::kFirstFloat8 && bits == 8;
  const std::string value = text("DLPack type code ", code, ", bits ", bits, ", lanes ", int{tensor.type_lanes});
  if (is_fp8)
    refuse(ErrorCode::not_implemented, name, value, "fp8 comes later; use float16, bfloat16, float32 or float64");
  refuse_type(name, value, kDTypeRule);
}

DType dtype_named(const std::string& operand, std::string_view dtype) {
  for (const DType one :
       {DType::fp16, DType::bf16, DType::fp32, DType::fp64, DType::int32, DType::int64, DType::uint8, DType::boolean})
    if (narrows::name(one) == dtype) return one;
  refuse_type(operand, std::string(dtype), kDTypeRule);
}

void require_rank(const std::string& name, std::size_t rank) {
  if (rank == 0) refuse_value(name, "shape ()", "must have an axis", "(1,)");
}

}  // namespace

Operand Operand::from_buffer(std::string name, nb::handle array, std::string_view dtype, Access access) {
  auto release = [](Py_buffer* view) {
    PyBuffer_Release(view);
    delete view;
  };
  auto view = std::make_unique<Py_buffer>();
  const int flags = PyBUF_STRIDES | PyBUF_FORMAT | (access == Access::write ? PyBUF_WRITABLE : 0);
  if (PyObject_GetBuffer(array.ptr(), view.get(), flags) != 0) {
    nb::python_error cause;
    if (access == Access::write && !nb::cast<bool>(array.attr("flags").attr("writeable")))
      refuse_value(name, "read-only", kWriteRule);
    refuse_type(name, "dtype " + dtype_attribute(array), text("NumPy exports no such type: ", cause.what()));
  }
  const std::shared_ptr<Py_buffer> owner(view.release(), release);
  Operand operand(std::move(name), owner);
  operand.dtype_ = dtype_of_buffer(operand.name_, *owner, dtype, array);
  operand.data_ = owner->buf;
  const std::size_t rank = static_cast<std::size_t>(owner->ndim);
  require_rank(operand.name_, rank);
  for (std::size_t axis = 0; axis < rank; ++axis) {
    if (owner->shape[axis] > 1 && owner->strides[axis] % owner->itemsize != 0) {
      refuse_value(
          operand.name_, text("stride of ", owner->strides[axis], " bytes"),
          text("must be a multiple of its ", owner->itemsize, "-byte elements; pass ", operand.name_, ".copy()"));
    }
    operand.shape_.push_back(owner->shape[axis]);
    operand.strides_.push_back(owner->strides[axis] / owner->itemsize);
  }
  operand.check_alignment();
  return operand;
}

Operand Operand::from_dlpack(std::string name, nb::handle array, Access access, std::optional<std::uintptr_t> stream) {
  const Device device = device_of(name, array);
  if (device.kind == DeviceKind::cpu) stream.reset();  // has none
  const Imported imported = import_capsule(name, export_capsule(array, stream));
  if (access == Access::write && imported.read_only) {
    refuse_value(name, "read-only", kWriteRule);
  }
  Operand operand(std::move(name), imported.owner);
  operand.device_ = device;
  operand.dtype_ = dtype_of_dlpack(operand.name_, imported.tensor);
  require_rank(operand.name_, static_cast<std::size_t>(imported.tensor.rank));
  if (imported.tensor.data) operand.data_ = static_cast<std::byte*>(imported.tensor.data) + imported.tensor.byte_offset;
  operand.shape_.assign(imported.tensor.shape, imported.tensor.shape + imported.tensor.rank);
  if (imported.tensor.strides) {
    operand.strides_.assign(imported.tensor.strides, imported.tensor.strides + imported.tensor.rank);
  } else {
    operand.strides_.resize(operand.shape_.size());
    std::int64_t stride = 1;
    for (std::size_t axis = operand.shape_.size(); axis-- > 0;) {
      operand.strides_[axis] = stride;
      stride *= operand.shape_[axis];
    }
  }
  operand.check_alignment();
  return operand;
}

Operand Operand::from_address(std::string name, std::uintptr_t address, std::string_view dtype,
                              std::vector<std::int64_t> shape, std::vector<std::int64_t> strides, Device device,
                              nb::object owner) {
  require_rank(name, shape.size());
  Operand operand(std::move(name), std::make_shared<nb::object>(std::move(owner)));
  operand.data_ = reinterpret_cast<void*>(address);
  operand.device_ = device;
  operand.dtype_ = dtype_named(operand.name_, dtype);
  operand.shape_ = std::move(shape);
  operand.strides_ = std::move(strides);
  operand.check_alignment();
  return operand;
}

void Operand::check_alignment() const {
  const bool empty = std::find(shape_.begin(), shape_.end(), 0) != shape_.end();
  if (empty || reinterpret_cast<std::uintptr_t>(data_) % item_size(dtype_) == 0) return;
  refuse_value(name_, "unaligned",
               text("must lie at a multiple of its ", item_size(dtype_), "-byte elements; pass ", name_, ".copy()"));
}

void Operand::fold_leading(const std::vector<std::int64_t>& leading, std::size_t keep, bool broadcast) {
  const std::size_t rank = leading.size() + keep;
  const std::vector<std::int64_t> given = shape_;
  if (broadcast) {
    if (shape_.size() <= keep) return;  // broadcasts over the batch as it is
    while (shape_.size() < rank) {
      shape_.insert(shape_.begin(), 1);
      strides_.insert(strides_.begin(), 0);
    }
  }
  const auto matches = [&](std::size_t axis) {
    return shape_[axis] == leading[axis] || (broadcast && shape_[axis] == 1);
  };
  bool all_match = shape_.size() == rank;
  for (std::size_t axis = 0; all_match && axis < leading.size(); ++axis) all_match = matches(axis);
  if (!all_match) {
    refuse_value(name_, "shape " + shape_text(given),
                 text("must have leading sizes ", shape_text(leading), " before its last ", keep, " axes"));
  }
  std::int64_t size = 1;
  std::int64_t stride = 0;  // of the innermost axis that moves
  const auto outer = static_cast<std::ptrdiff_t>(leading.size());
  // One entry for the whole batch stays one: its gradient is a sum, which an expanded output could not hold.
  const bool single =
      broadcast && std::all_of(shape_.begin(), shape_.begin() + outer, [](std::int64_t n) { return n == 1; });
  for (std::size_t axis = single ? 0 : leading.size(); axis-- > 0;) {
    const std::int64_t step = shape_[axis] == leading[axis] ? strides_[axis] : 0;
    if (leading[axis] > 1 && size == 1) stride = step;
    if (leading[axis] > 1 && size > 1 && step != stride * size) {
      refuse_value(name_, text("shape ", shape_text(given), " with strides ", shape_text(strides_)),
                   text("axes before the last ", keep,
                        " must be one batch axis without a copy; pass a contiguous copy of ", name_));
    }
    size *= leading[axis];
  }
  shape_.erase(shape_.begin(), shape_.begin() + outer);
  strides_.erase(strides_.begin(), strides_.begin() + outer);
  shape_.insert(shape_.begin(), size);
  strides_.insert(strides_.begin(), stride);
}

Tensor Operand::tensor() const {
  if (shape_.size() > Dims::kMaxRank) {
    refuse_value(name_, "shape " + shape_text(shape_), text("must have at most ", Dims::kMaxRank, " axes"));
  }
  Tensor tensor{data_, dtype_, {}, {}, device_};
  for (const std::int64_t size : shape_) tensor.shape.push_back(size);
  for (const std::int64_t stride : strides_) tensor.strides.push_back(stride);
  return tensor;
}

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "(";
  for (std::size_t axis = 0; axis < shape.size(); ++axis) text += (axis ? ", " : "") + std::to_string(shape[axis]);
  return text + (shape.size() == 1 ? ",)" : ")");
}

}  // namespace narrows::python
