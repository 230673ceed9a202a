#include "cuda/tensor_map.hpp"

#include "cuda/driver.hpp"

#include <algorithm>
#include <array>

namespace narrows::cuda {
namespace {

// CUtensorMapDataType and its neighbours.
enum MapType : int { kMapFp16 = 6, kMapBf16 = 9 };
enum MapOption : int { kNoInterleave = 0, kSwizzle128 = 3, kPromote256 = 3, kFillZeros = 0 };
constexpr unsigned kBoxColumns = 64;

}  // namespace

TensorMap tensor_map(const View& view, const TensorSizes& sizes, i64 box_rows) {
  const auto size = [](i64 count) { return static_cast<u64>(count); };
  const std::array dims{size(sizes.columns), size(sizes.rows), size(sizes.heads), size(sizes.sequences)};
  // The stride of an axis of one element means nothing, but must be a multiple of 16 bytes.
  const auto stride = [&](std::size_t axis, i64 count) { return count == 1 ? u64{16} : size(view.strides[axis]); };
  const std::array strides{stride(1, sizes.rows), stride(2, sizes.heads), stride(0, sizes.sequences)};
  const std::array<unsigned, 4> box{kBoxColumns, static_cast<unsigned>(box_rows), 1, 1}, steps{1, 1, 1, 1};
  TensorMap map;
  check(driver().cuTensorMapEncodeTiled(&map, view.dtype == DType::fp16 ? kMapFp16 : kMapBf16, 4, view.data,
                                        dims.data(), strides.data(), box.data(), steps.data(), kNoInterleave,
                                        kSwizzle128, kPromote256, kFillZeros),
        "describing a tensor of ", sizes.sequences, " x ", sizes.rows, " x ", sizes.heads, " x ", sizes.columns,
        " elements to the copy engine");
  return map;
}

}  // namespace narrows::cuda
