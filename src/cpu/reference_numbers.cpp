#include "cpu/reference_numbers.hpp"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <limits>
#include <thread>

namespace narrows::reference {
namespace {

/// A binary floating format: 1 sign bit, `mantissa` stored bits, normal numbers from 2^lowest to below 2^(-lowest + 2).
struct Format {
  int mantissa;
  int lowest;
};
constexpr Format kFp16{10, -14}, kBf16{7, -126};

// std::ldexp and std::ilogb took a quarter of the tests' time. A double's exponent field holds these formats' powers of two, and
// answers less than either's `lowest` for what is no normal double.
double power_of_two(int exponent) { return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52); }
int exponent_of(double finite) { return static_cast<int>(std::bit_cast<std::uint64_t>(finite) >> 52 & 0x7FF) - 1023; }

double to_format(Format format, double value) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int exponent = std::max(exponent_of(value), format.lowest);
  const double step = power_of_two(exponent - format.mantissa);
  const double rounded = std::nearbyint(value / step) * step;  // the quotient is exact: step is a power of two
  const double limit = power_of_two(2 - format.lowest);
  return std::abs(rounded) >= limit ? std::copysign(std::numeric_limits<double>::infinity(), value) : rounded;
}

/// Bits of a 16-bit format for a value that it can hold.
std::uint16_t encode(Format format, double value) {
  const int exponent_bits = 15 - format.mantissa;
  const int all_ones = (1 << exponent_bits) - 1;
  const int sign = std::signbit(value) ? 1 << 15 : 0;
  if (std::isnan(value))
    return static_cast<std::uint16_t>(sign | all_ones << format.mantissa | 1 << (format.mantissa - 1));
  if (std::isinf(value)) return static_cast<std::uint16_t>(sign | all_ones << format.mantissa);
  if (value == 0) return static_cast<std::uint16_t>(sign);
  const int exponent = std::max(exponent_of(value), format.lowest);
  const int scaled = static_cast<int>(std::abs(value) * power_of_two(format.mantissa - exponent));
  // A normal number's leading bit, 1 << mantissa, is what raises the exponent field from 0 (subnormal) to 1.
  return static_cast<std::uint16_t>(sign | (((exponent - format.lowest) << format.mantissa) + scaled));
}

double decode(Format format, std::uint16_t bits) {
  const int exponent_bits = 15 - format.mantissa;
  const int exponent = bits >> format.mantissa & ((1 << exponent_bits) - 1);
  const int fraction = bits & ((1 << format.mantissa) - 1);
  const double sign = bits >> 15 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1)
    return fraction ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  const double step = power_of_two(format.lowest - format.mantissa + std::max(exponent - 1, 0));
  return sign * step * (exponent == 0 ? fraction : fraction + (1 << format.mantissa));
}

}  // namespace

double round_to(DType dtype, double value) {
  switch (dtype) {
    case DType::fp16: return to_format(kFp16, value);
    case DType::bf16: return to_format(kBf16, value);
    case DType::fp32: return static_cast<double>(static_cast<float>(value));
    default: return value;
  }
}

double load(const void* data, DType dtype, Index element) {
  switch (dtype) {
    case DType::fp16: return decode(kFp16, static_cast<const std::uint16_t*>(data)[element]);
    case DType::bf16: return decode(kBf16, static_cast<const std::uint16_t*>(data)[element]);
    case DType::fp32: return static_cast<double>(static_cast<const float*>(data)[element]);
    case DType::fp64: return static_cast<const double*>(data)[element];
    case DType::int32: return static_cast<const std::int32_t*>(data)[element];
    case DType::int64: return static_cast<double>(static_cast<const std::int64_t*>(data)[element]);
    case DType::uint8:
    case DType::boolean: return static_cast<const std::uint8_t*>(data)[element];
  }
  return 0;
}

void store(void* data, DType dtype, Index element, double value) {
  switch (dtype) {
    case DType::fp16: static_cast<std::uint16_t*>(data)[element] = encode(kFp16, to_format(kFp16, value)); break;
    case DType::bf16: static_cast<std::uint16_t*>(data)[element] = encode(kBf16, to_format(kBf16, value)); break;
    case DType::fp32: static_cast<float*>(data)[element] = static_cast<float>(value); break;
    case DType::fp64: static_cast<double*>(data)[element] = value; break;
    case DType::int32: static_cast<std::int32_t*>(data)[element] = static_cast<std::int32_t>(value); break;
    case DType::int64: static_cast<std::int64_t*>(data)[element] = static_cast<std::int64_t>(value); break;
    case DType::uint8:
    case DType::boolean: static_cast<std::uint8_t*>(data)[element] = static_cast<std::uint8_t>(value); break;
  }
}

View::View(const Tensor& tensor) : tensor_(tensor) {
  if (tensor_.strides.empty()) tensor_.strides = row_major(tensor_.shape);
}

Index View::offset(const Dims& coordinates) const {
  Index sum = 0;
  for (std::size_t axis = 0; axis < coordinates.rank(); ++axis) sum += coordinates[axis] * tensor_.strides[axis];
  return sum;
}

View broadcast(const Tensor& tensor) {
  if (!tensor.given()) return View();
  const Dims strides = tensor.strides.empty() ? row_major(tensor.shape) : tensor.strides;
  Tensor full = tensor;
  full.shape = full.strides = Dims{};
  for (std::size_t missing = tensor.shape.rank(); missing < 4; ++missing) {
    full.shape.push_back(1);
    full.strides.push_back(0);
  }
  for (std::size_t axis = 0; axis < tensor.shape.rank(); ++axis) {
    full.shape.push_back(tensor.shape[axis]);
    full.strides.push_back(tensor.shape[axis] == 1 ? 0 : strides[axis]);
  }
  return View(full);
}

Dims row_major(const Dims& shape) {
  Dims strides = shape;
  Index stride = 1;
  for (std::size_t axis = shape.rank(); axis-- > 0;) {
    strides[axis] = stride;
    stride *= shape[axis];
  }
  return strides;
}

Index elements(const Dims& shape) {
  Index count = 1;
  for (const Index size : shape) count *= size;
  return count;
}

void advance(Dims& coordinates, const Dims& shape) {
  for (std::size_t axis = shape.rank(); axis-- > 0;) {
    if (++coordinates[axis] < shape[axis]) return;
    coordinates[axis] = 0;
  }
}

void split(Index count, int threads, const std::function<void(Index)>& task) {
  if (threads <= 0) threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  std::atomic<Index> next{0};
  const auto work = [&] {
    for (Index index = next++; index < count; index = next++) task(index);
  };
  std::vector<std::jthread> helpers;
  for (Index helper = 1; helper < std::min<Index>(threads, count); ++helper) helpers.emplace_back(work);
  work();
}

}  // namespace narrows::reference
