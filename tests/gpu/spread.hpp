// Tensors of more than 2^31 elements on a GPU.
#pragma once

#include "cpu/reference_numbers.hpp"
#include "tests/gpu/device_call.hpp"

#include <optional>
#include <string>

namespace narrows::test {

/// A tensor whose rows lie far apart on the device. Its last axis stays whole; between the rows nothing is ever written.
class Spread {
 public:
  /// wide: the axis whose last index is more than 2^31 elements from its first.
  Spread(const Tensor& host, std::size_t wide) : host_(host), device_(host) {
    const std::int64_t item = static_cast<std::int64_t>(item_size(host.dtype));
    const std::int64_t steps = host.shape[wide] - 1;
    device_.strides[wide] = ((std::int64_t{1} << 31) / steps / 64 + 1) * 64;
    block_.emplace((last(device_) + host.shape[host.shape.rank() - 1]) * item);
    device_.data = block_->data();
    device_.device = {DeviceKind::cuda, 0};
    each_row([&](std::int64_t from, std::int64_t to, std::int64_t bytes) {
      block_->upload(static_cast<const std::byte*>(host_.data) + from, bytes, to);
    });
  }
  Tensor tensor() const { return device_; }
  void poison() { block_->fill(0xFF); }
  void download() const {
    each_row([&](std::int64_t from, std::int64_t to, std::int64_t bytes) {
      block_->download(static_cast<std::byte*>(host_.data) + from, bytes, to);
    });
  }
  bool margins_intact() const { return block_->margins_intact(); }

 private:
  static std::int64_t last(const Tensor& t) {
    std::int64_t place = 0;
    for (std::size_t axis = 0; axis + 1 < t.shape.rank(); ++axis) place += (t.shape[axis] - 1) * t.strides[axis];
    return place;
  }
  /// Calls visit(byte on the host, byte on the device, bytes) for each run of the last axis.
  template <class Visit> void each_row(const Visit& visit) const {
    const std::int64_t item = static_cast<std::int64_t>(item_size(host_.dtype));
    const std::size_t rank = host_.shape.rank();
    Dims rows = host_.shape;
    rows[rank - 1] = 1;
    Dims at = reference::first_of(rows);
    for (std::int64_t row = 0; row < reference::elements(rows); ++row, reference::advance(at, rows)) {
      std::int64_t from = 0, to = 0;
      for (std::size_t axis = 0; axis < rank; ++axis) {
        from += at[axis] * host_.strides[axis];
        to += at[axis] * device_.strides[axis];
      }
      visit(from * item, to * item, host_.shape[rank - 1] * item);
    }
  }

  Tensor host_, device_;
  std::optional<DeviceBlock> block_;
};

inline std::string too_small(std::int64_t bytes) {
  const std::int64_t free = free_device_bytes();
  return free >= bytes ? "" : text("needs ", bytes, " bytes of device memory, ", free, " are free");
}

}  // namespace narrows::test
