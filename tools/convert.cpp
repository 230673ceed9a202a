#include "tools/convert.hpp"

#include <cstring>
#include <limits>

#include <fmt/format.h>

#include "core/error.hpp"
#include "cpu/reference_numbers.hpp"
#include "tools/files/layout.hpp"

namespace narrows::cli {
namespace {

Tensor over(const files::Array& array, std::span<const std::byte> bytes, DType dtype) {
  return {const_cast<std::byte*>(bytes.data()), dtype, array.shape, array.strides, Device{}};
}

/// A row-major copy as another dtype: convert(from, to, n) fills in element n.
template <class Convert>
Tensor converted(std::string_view subject, const files::Array& array, DType dtype, Owners& owners, Convert convert) {
  files::Array dense = files::packed(subject, array);
  const std::size_t count = dense.bytes.size() / item_size(array.dtype);
  const files::Memory memory = files::allocate(subject, count * item_size(dtype));
  owners.push_back(memory.owner);
  for (std::size_t n = 0; n < count; ++n) convert(dense.bytes.data(), memory.bytes.data(), n);
  return over(dense, memory.bytes, dtype);
}

}  // namespace

Tensor tensor_of(std::string_view subject, const files::Array& array) {
  if (array.shape.empty())
    throw Error(ErrorCode::invalid_file, fmt::format("{}: a number without axes; a tensor has at least one", subject));
  return over(array, array.bytes, array.dtype);
}

Tensor tensor_of(std::string_view subject, const files::Array& array, TensorName::Kind kind, Owners& owners) {
  const Tensor tensor = tensor_of(subject, array);
  if (kind == TensorName::indices && array.dtype == DType::int64)
    return converted(subject, array, DType::int32, owners, [&](const std::byte* from, std::byte* to, std::size_t n) {
      std::int64_t value = 0;
      std::memcpy(&value, from + n * sizeof value, sizeof value);
      using Limits = std::numeric_limits<std::int32_t>;
      if (value < Limits::min() || value > Limits::max())
        refuse_value(fmt::format("{}[{}]", subject, n), value, "must fit in int32");
      const auto narrow = static_cast<std::int32_t>(value);
      std::memcpy(to + n * sizeof narrow, &narrow, sizeof narrow);
    });
  if (kind == TensorName::booleans && array.dtype == DType::uint8)
    return converted(subject, array, DType::boolean, owners, [&](const std::byte* from, std::byte* to, std::size_t n) {
      if (from[n] > std::byte{1})
        refuse_value(fmt::format("{}[{}]", subject, n), static_cast<int>(from[n]),
                     "a mask of uint8 holds 0 and 1 (may attend)", "1");
      to[n] = from[n];
    });
  return tensor;
}

Tensor rounded(std::string_view subject, const files::Array& array, DType dtype, Owners& owners) {
  const Tensor tensor = tensor_of(subject, array);
  if (array.dtype == dtype) return tensor;
  if (!is_floating(array.dtype))
    refuse_type(subject, array.dtype, fmt::format("only floats are rounded to {}", name(dtype)));
  return converted(subject, array, dtype, owners, [&](const std::byte* from, std::byte* to, std::size_t n) {
    const auto element = static_cast<reference::Index>(n);
    reference::store(to, dtype, element, reference::load(from, array.dtype, element));
  });
}

}  // namespace narrows::cli
