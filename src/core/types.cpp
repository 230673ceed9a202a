#include "core/types.hpp"

#include <array>
#include <charconv>

namespace narrows {

std::string_view name(DType dtype) noexcept {
  switch (dtype) {
    case DType::fp16: return "fp16";
    case DType::bf16: return "bf16";
    case DType::fp32: return "fp32";
    case DType::fp64: return "fp64";
    case DType::int32: return "int32";
    case DType::int64: return "int64";
    case DType::uint8: return "uint8";
    case DType::boolean: return "boolean";
  }
  return "unknown";
}

std::size_t item_size(DType dtype) noexcept {
  switch (dtype) {
    case DType::fp16:
    case DType::bf16: return 2;
    case DType::fp32:
    case DType::int32: return 4;
    case DType::fp64:
    case DType::int64: return 8;
    case DType::uint8:
    case DType::boolean: return 1;
  }
  return 0;
}

std::string to_text(double value) {
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  return {digits.data(), end};
}

std::string to_text(const Dims& value) {
  std::string joined = "(";
  for (std::size_t axis = 0; axis < value.rank(); ++axis) joined += (axis ? ", " : "") + std::to_string(value[axis]);
  return joined + (value.rank() == 1 ? ",)" : ")");
}

std::string to_text(DType value) { return std::string(name(value)); }

std::string to_text(const Device& value) {
  return value.kind == DeviceKind::cpu ? "cpu" : "cuda:" + std::to_string(value.index);
}

std::string to_text(Causal value) {
  switch (value) {
    case Causal::none: return "none";
    case Causal::bottom_right: return "bottom_right";
    case Causal::top_left: return "top_left";
  }
  return "unknown";
}

}  // namespace narrows
