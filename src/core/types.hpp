// Facts about element types, and numbers as text for messages.
#pragma once

#include <narrows/narrows.hpp>

#include "shared/params.h"

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

namespace narrows {

constexpr bool is_floating(DType dtype) { return dtype <= DType::fp64; }
/// What products are accumulated in, and the dtype of the LSE.
constexpr DType accumulator(DType dtype) { return dtype == DType::fp64 ? DType::fp64 : DType::fp32; }

template <std::integral Integer> std::string to_text(Integer value) { return std::to_string(value); }
std::string to_text(double value);       // shortest form that reads back to the same number
std::string to_text(const Dims& value);  // (2, 5, 8, 64)
std::string to_text(DType value);
std::string to_text(const Device& value);  // cpu, cuda:1
std::string to_text(Causal value);
inline std::string to_text(std::string_view value) { return std::string(value); }
inline std::string to_text(const char* value) { return value; }

/// text("q has ", 3, " heads")
template <class... Parts> std::string text(const Parts&... parts) {
  std::string joined;
  ((joined += to_text(parts)), ...);
  return joined;
}

}  // namespace narrows
