#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <narrows/narrows.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace narrows::python {

namespace nb = nanobind;

enum class Access : bool { read, write };

/// An argument's memory, borrowed from a Python object through the buffer protocol or DLPack for as long as this lives.
/// Nothing is copied. Made and destroyed with the GIL held.
class Operand {
 public:
  /// A NumPy array. `dtype` names the element type where NumPy cannot export it (bf16, given as a view of 16-bit
  /// integers), else it is empty.
  static Operand from_buffer(std::string name, nb::handle array, std::string_view dtype, Access access);
  /// Any object with __dlpack__, in memory that the CPU can address or a CUDA device's. `stream`: DLPack's number for the
  /// CUDA stream on which its elements will be read or written.
  static Operand from_dlpack(std::string name, nb::handle array, Access access, std::optional<std::uintptr_t> stream);

  /// Of an array whose library tells where its elements are: `owner` keeps them there. Strides are in elements.
  static Operand from_address(std::string name, std::uintptr_t address, std::string_view dtype,
                              std::vector<std::int64_t> shape, std::vector<std::int64_t> strides, Device device,
                              nb::object owner);

  const std::string& name() const { return name_; }
  DType dtype() const { return dtype_; }
  const std::vector<std::int64_t>& shape() const { return shape_; }

  /// Makes the axes before the last `keep` one axis, by strides alone. `leading` holds q's sizes of those axes; with
  /// `broadcast`, sizes of 1 and missing axes stretch to them. Throws where that would need a copy.
  void fold_leading(const std::vector<std::int64_t>& leading, std::size_t keep, bool broadcast);

  /// Throws beyond Dims::kMaxRank axes.
  Tensor tensor() const;

 private:
  Operand(std::string name, std::shared_ptr<void> owner) : name_(std::move(name)), owner_(std::move(owner)) {}
  void check_alignment() const;

  std::string name_;
  std::shared_ptr<void> owner_;
  void* data_ = nullptr;
  Device device_;
  DType dtype_ = DType::fp32;
  std::vector<std::int64_t> shape_;
  std::vector<std::int64_t> strides_;  // in elements
};

std::string shape_text(const std::vector<std::int64_t>& shape);  // "(2, 3)", "(2,)" as Python writes it

}  // namespace narrows::python
