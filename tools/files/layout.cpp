#include "tools/files/layout.hpp"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include <fmt/format.h>

#include "tools/files/failure.hpp"

namespace narrows::files {
namespace {

bool multiply(std::int64_t a, std::int64_t b, std::int64_t& product) { return !__builtin_mul_overflow(a, b, &product); }

bool is_row_major(const Array& array) {
  const Dims dense = row_major_strides(array.shape);
  for (std::size_t axis = 0; axis < dense.rank(); ++axis)
    if (array.shape[axis] != 1 && array.strides[axis] != dense[axis]) return false;
  return true;
}

/// Bytes from the first element to the end of the last one.
std::int64_t extent_bytes(std::string_view subject, const Array& array) {
  std::int64_t last = 0;
  for (std::size_t axis = 0; axis < array.shape.rank(); ++axis) {
    const std::int64_t stride = array.strides[axis];
    if (array.shape[axis] < 2) continue;
    std::int64_t step = 0;
    if (stride < 0 || !multiply(array.shape[axis] - 1, stride, step) || __builtin_add_overflow(last, step, &last))
      fail(subject, fmt::format("stride {} of axis {} is negative or leaves 63 bits", stride, axis));
  }
  std::int64_t bytes = 0;
  if (last == INT64_MAX || !multiply(last + 1, static_cast<std::int64_t>(item_size(array.dtype)), bytes))
    fail(subject, fmt::format("strides {} reach beyond 63 bits", text_of(array.strides)));
  return bytes;
}

void gather(const Array& from, std::size_t axis, const std::byte* source, std::byte*& target) {
  const std::size_t item = item_size(from.dtype);
  if (axis == from.shape.rank()) {
    std::memcpy(target, source, item);
    target += item;
    return;
  }
  for (std::int64_t index = 0; index < from.shape[axis]; ++index)
    gather(from, axis + 1, source + static_cast<std::size_t>(index * from.strides[axis]) * item, target);
}

}  // namespace

std::int64_t dense_bytes(std::string_view subject, const Dims& shape, DType dtype) {
  const auto item = static_cast<std::int64_t>(item_size(dtype));
  std::int64_t span = item;
  bool empty = false;
  for (const std::int64_t size : shape) {
    if (size < 0) fail(subject, fmt::format("shape {}: size {} is negative", text_of(shape), size));
    empty = empty || size == 0;
    if (size != 0 && !multiply(span, size, span))
      fail(subject, fmt::format("shape {} of {}-byte items leaves 63 bits", text_of(shape), item));
  }
  return empty ? 0 : span;
}

Dims row_major_strides(const Dims& shape) {
  Dims strides = shape;
  std::int64_t step = 1;
  for (std::size_t axis = shape.rank(); axis-- > 0;) {
    strides[axis] = step;
    step *= std::max<std::int64_t>(shape[axis], 1);
  }
  return strides;
}

Dims column_major_strides(const Dims& shape) {
  Dims strides = shape;
  std::int64_t step = 1;
  for (std::size_t axis = 0; axis < shape.rank(); ++axis) {
    strides[axis] = step;
    step *= std::max<std::int64_t>(shape[axis], 1);
  }
  return strides;
}

Memory allocate(std::string_view subject, std::size_t size) {
  constexpr std::align_val_t kAlignment{64};
  try {
    const std::shared_ptr<void> owner(::operator new(size, kAlignment),
                                      [](void* memory) { ::operator delete(memory, kAlignment); });
    return {{static_cast<std::byte*>(owner.get()), size}, owner};
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::out_of_memory, fmt::format("{}: {} bytes of memory are not available", subject, size));
  }
}

Array checked_array(std::string_view subject, Array array) {
  if (array.dtype == DType::boolean) {
    const auto wrong =
        std::find_if(array.bytes.begin(), array.bytes.end(), [](std::byte b) { return b > std::byte{1}; });
    if (wrong != array.bytes.end())
      fail(subject, fmt::format("element {} is {}; a boolean is stored as 0 or 1", wrong - array.bytes.begin(),
                                static_cast<int>(*wrong)));
  }
  if (reinterpret_cast<std::uintptr_t>(array.bytes.data()) % item_size(array.dtype) != 0) {
    const Memory copy = allocate(subject, array.bytes.size());
    std::copy(array.bytes.begin(), array.bytes.end(), copy.bytes.begin());
    array.bytes = copy.bytes;
    array.owner = copy.owner;
  }
  return array;
}

Array packed(std::string_view subject, const Array& array) {
  Array source = array;
  if (source.strides.empty()) source.strides = row_major_strides(source.shape);
  if (source.strides.rank() != source.shape.rank())
    fail(subject,
         fmt::format("strides {} and shape {} differ in rank", text_of(source.strides), text_of(source.shape)));
  const std::int64_t size = dense_bytes(subject, source.shape, source.dtype);
  const std::int64_t extent = size == 0 ? 0 : extent_bytes(subject, source);
  if (static_cast<std::uint64_t>(extent) > source.bytes.size())
    fail(subject, fmt::format("shape {} with strides {} needs {} bytes; the array has {}", text_of(source.shape),
                              text_of(source.strides), extent, source.bytes.size()));
  if (size == 0 || is_row_major(source)) {
    source.bytes = source.bytes.first(static_cast<std::size_t>(size));
    source.strides = row_major_strides(source.shape);
    return source;
  }
  const Memory memory = allocate(subject, static_cast<std::size_t>(size));
  std::byte* target = memory.bytes.data();
  gather(source, 0, source.bytes.data(), target);
  source.bytes = memory.bytes;
  source.owner = memory.owner;
  source.strides = row_major_strides(source.shape);
  return source;
}

}  // namespace narrows::files
