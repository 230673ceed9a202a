// Calls over paged caches, and how far their results may be from exact ones.
#pragma once

#include "cpu/reference.hpp"
#include "tests/gpu/breaches.hpp"
#include "tests/gpu/turned_first.hpp"

#include <cmath>
#include <vector>

namespace narrows::test {

/// How far O and LSE may be from exact ones, whatever the rounding: in 16 bits each weight is rounded, and so is O;
/// tanh.approx errs by 2^-11 of the cap.
struct Bounds {
  double o, lse, least;  // o: of sum(P |V|); lse: beside the criterion's; least: where fp16's weights are subnormal

  Bounds(DType dtype, double softcap)
      : o(dtype == DType::bf16   ? 0x1.05p-7
          : dtype == DType::fp16 ? 0x1.05p-10
                                 : 0x1p-18),
        lse(dtype == DType::fp32 ? 0 : softcap * 0x1.4p-11),
        least(dtype == DType::fp16 ? 2e-5 : 1e-7) {
    o += 2 * lse;
  }
};

inline Array absolute(const Tensor& tensor) {
  const reference::View view(tensor);
  return Array(tensor.dtype, tensor.shape).fill([&](const Dims& at) { return std::abs(view.element(at)); });
}

inline void expect_within_bounds(const Attention& a) {
  const TurnedFirst turned(a.in(), a.options);
  const reference::ForwardResult exact = reference::exact_forward(turned.in, turned.options);
  Inputs in = turned.in;
  Options options = turned.options;
  const Array v = absolute(in.v), v_new = options.v_new.given() ? absolute(options.v_new) : Array();
  in.v = v;
  options.v_new = v_new;
  const reference::ForwardResult magnitude = reference::exact_forward(in, options);
  const Bounds bounds(a.q.dtype(), options.softcap);
  const std::vector<double> o = a.o.values(), lse = a.lse.values();
  for (std::size_t i = 0; i < o.size(); ++i) {
    const double scale = a.q.dtype() == DType::fp32 ? 1 + exact.o.logit[i] : 1;
    ASSERT_LE(std::abs(o[i] - exact.o.value[i]), bounds.o * scale * magnitude.o.value[i] + bounds.least)
        << "O element " << i;
  }
  for (std::size_t i = 0; i < lse.size(); ++i) {
    if (std::isinf(exact.lse.value[i]))
      ASSERT_EQ(lse[i], exact.lse.value[i]) << "LSE element " << i;
    else
      ASSERT_LE(std::abs(lse[i] - exact.lse.value[i]), 2e-5 * (1 + exact.lse.logit[i] / 8) + bounds.lse)
          << "LSE element " << i;
  }
}

/// Sequences of 4 query heads over 2 kv heads, in pages in no order; slots that nobody fills are NaN.
struct Paged {
  std::int64_t batch, queries, pages, page;  // pages: of a sequence; page: slots of one
  Attention a;
  Array filled, table;

  Paged(const std::vector<double>& lengths, std::int64_t sq, DType dtype = DType::bf16, std::int64_t pages_ = 20,
        std::int64_t page_ = 16)
      : batch(static_cast<std::int64_t>(lengths.size())),
        queries(sq),
        pages(pages_),
        page(page_),
        a({batch, sq, 1, 4, 2, 64, 64}, dtype),
        filled(int32_array(lengths)),
        table(DType::int32, {batch, pages}) {
    a.k = Array(dtype, {batch * pages, page, 2, 64});
    a.v = Array(dtype, {batch * pages, page, 2, 64});
    table.fill([&](const Dims& at) { return static_cast<double>((at[0] * pages + at[1]) * 7 % (batch * pages)); });
    for (std::int64_t b = 0; b < batch; ++b)
      fill(b, 0, static_cast<std::int64_t>(lengths[static_cast<std::size_t>(b)]));
    a.options.cache_seqlens = filled;
    a.options.block_table = table;
    a.options.causal = Causal::bottom_right;
    a.options.family = "sm80";
  }

  std::int64_t page_of(std::int64_t b, std::int64_t slot) const {
    return static_cast<std::int64_t>(table[{b, slot / page}]);
  }
  static double key(std::int64_t slot, std::int64_t h, std::int64_t x) {
    return std::sin(static_cast<double>(slot * 131 + h * 17) + static_cast<double>((slot + 5) * (x + 3)) * 0.37);
  }
  static double value(std::int64_t slot, std::int64_t h, std::int64_t x) {
    return std::cos(static_cast<double>(slot * 57 + h * 29) + static_cast<double>((slot + 7) * (x + 1)) * 0.59);
  }
  void fill(std::int64_t b, std::int64_t begin, std::int64_t end) {
    for (std::int64_t slot = begin; slot < end; ++slot) {
      const std::int64_t row = page_of(b, slot);
      for (std::int64_t h = 0; h < 2; ++h)
        for (std::int64_t x = 0; x < 64; ++x) {
          a.k.set({row, slot % page, h, x}, key(slot, h, x));
          a.v.set({row, slot % page, h, x}, value(slot, h, x));
        }
    }
  }
  /// The same keys for slots [first, first + rows) of each sequence, to be appended.
  Array fresh(std::int64_t first, std::int64_t rows, bool keys) const {
    return Array(a.k.dtype(), {batch, rows, 2, 64}).fill([&](const Dims& at) {
      return keys ? key(first + at[1], at[2], at[3]) : value(first + at[1], at[2], at[3]);
    });
  }
  CallStatus run() {
    a.o.poison();
    a.lse.poison();
    DeviceCall gpu(a.in(), a.out(), a.options);
    gpu.run();
    gpu.download();
    EXPECT_TRUE(gpu.surroundings_intact());
    return gpu.status();
  }
};

}  // namespace narrows::test
