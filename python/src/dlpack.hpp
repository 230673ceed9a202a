// The DLPack interchange structures (ABI 1.x), as laid down by the DLPack standard.
#pragma once

#include <cstdint>

namespace narrows::python::dlpack {

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kRocmHost = 11 };
enum TypeCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kBool = 6, kFirstFloat8 = 7 };

struct DLTensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t rank;
  std::uint8_t type_code;
  std::uint8_t type_bits;
  std::uint16_t type_lanes;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null = row-major without gaps
  std::uint64_t byte_offset;
};
static_assert(sizeof(DLTensor) == 48);

/// Held by a capsule named "dltensor".
struct Managed {
  DLTensor tensor;
  void* context;
  void (*deleter)(Managed*);
};

/// Held by a capsule named "dltensor_versioned".
struct ManagedVersioned {
  std::uint32_t major;
  std::uint32_t minor;
  void* context;
  void (*deleter)(ManagedVersioned*);
  std::uint64_t flags;
  DLTensor tensor;
};

inline constexpr std::uint32_t kMajor = 1;
inline constexpr std::uint64_t kReadOnly = 1;

}  // namespace narrows::python::dlpack
