#include "core/tensors.hpp"

#include <gtest/gtest.h>

#include <limits>

namespace narrows {
namespace {

constexpr i64 kMost = std::numeric_limits<i64>::max();

TEST(Tensors, strides_of_a_tensor_without_elements_mean_nothing) {
  const Tensor given{.shape = {2, 0, 3}, .strides = {kMost, -kMost - 1, kMost}};
  const Tensor row_major{.shape = {0, kMost, 4}};  // its first stride would not fit in 64 bits
  for (const Tensor& tensor : {given, row_major}) {
    for (std::size_t axis = 0; axis < 3; ++axis) EXPECT_EQ(stride(tensor, axis), 0);
    EXPECT_EQ(view_of(tensor, Axes{0, 1, 2, -1}).strides, (std::array<i64, 4>{}));
    const Layout layout = layout_of(tensor);
    EXPECT_TRUE(layout.given && layout.unit_last && !layout.expanded);
    EXPECT_EQ(layout.elements, 0);
    EXPECT_NO_THROW(check_memory("q", tensor, Device{}, true));
  }
}

}  // namespace
}  // namespace narrows
