// KV caches of heads of 576 columns on Hopper: V as a part of K's memory, any number of heads, lengths and pages, the bits of
// repeated calls, and more sequences than a thread block looks at together.
#include "tests/gpu/breaches.hpp"
#include "tests/support/check.hpp"

#include <cmath>

namespace narrows::test {
namespace {

/// One kv head whose values are the first 512 columns of its keys; slots that nobody fills are NaN.
struct Latent {
  static constexpr std::int64_t kWidth = 576, kValueWidth = 512;

  Attention a;
  Array filled, table;

  Latent(const std::vector<double>& lengths, std::int64_t queries, std::int64_t heads, std::int64_t page = 0,
         DType dtype = DType::bf16)
      : a({static_cast<std::int64_t>(lengths.size()), queries, 1, heads, 1, kWidth, kValueWidth}, dtype),
        filled(int32_array(lengths)) {
    const std::int64_t batch = filled.shape()[0],
                       most = static_cast<std::int64_t>(*std::max_element(lengths.begin(), lengths.end()));
    const std::int64_t rows = page ? (most + page - 1) / page : 1,
                       slots = page ? page : std::max<std::int64_t>(most, 1);
    a.k = Array(dtype, {batch * rows, slots, 1, kWidth});
    a.v = Array(dtype, {batch * rows, slots, 1, kValueWidth});
    table = Array(DType::int32, {batch, rows});
    table.fill([&](const Dims& at) { return static_cast<double>((at[0] * rows + at[1]) * 7 % (batch * rows)); });
    if (batch * rows % 7 == 0)
      table.fill([&](const Dims& at) { return static_cast<double>(batch * rows - 1 - at[0] * rows - at[1]); });
    Array random(dtype, {most, 1, kWidth});
    random.fill_gaussian(5);
    for (std::int64_t b = 0; b < batch; ++b)
      for (std::int64_t slot = 0; slot < static_cast<std::int64_t>(filled[{b}]); ++slot) {
        const std::int64_t row = page ? static_cast<std::int64_t>(table[{b, slot / slots}]) : b, place = slot % slots;
        for (std::int64_t x = 0; x < kWidth; ++x) {
          const double element = random[{(slot + 37 * b) % most, 0, x}];
          a.k.set({row, place, 0, x}, element);
          if (x < kValueWidth) a.v.set({row, place, 0, x}, element);
        }
      }
    a.options.cache_seqlens = filled;
    if (page) a.options.block_table = table;
    a.options.causal = Causal::bottom_right;
    a.options.family = "sm90";
  }

  CallStatus run(bool shares) {
    a.o.poison();
    a.lse.poison();
    DeviceCall gpu(a.in(), a.out(), a.options);
    if (shares) share(gpu);
    gpu.run();
    gpu.download();
    EXPECT_TRUE(gpu.surroundings_intact());
    return gpu.status();
  }
  /// V becomes a view of K.
  void share(DeviceCall& gpu) const {
    const std::int64_t slots = a.k.shape()[1];
    gpu.in.v = {gpu.in.k.data, a.k.dtype(), a.v.shape(), {slots * kWidth, kWidth, kWidth, 1}, gpu.in.k.device};
  }
};

class GpuLatent : public GpuTest {
 protected:
  std::string_view family() const override { return "sm90"; }
};

TEST_F(GpuLatent, a_view_of_k_as_v_has_the_bits_of_a_v_of_its_own) {
  for (const std::int64_t page : {0, 1, 24, 64})
    for (const std::int64_t heads : {1, 16, 64, 128}) {
      SCOPED_TRACE(testing::Message() << heads << " heads, pages of " << page);
      Latent call({200, 64, 65, 0, 1}, heads == 16 ? 4 : 1, heads, page, heads == 1 ? DType::fp16 : DType::bf16);
      ASSERT_EQ(call.run(false).code, 0);
      EXPECT_TRUE(forward_agrees(call.a.in(), call.a.out(), call.a.options));
      const Array o = call.a.o, lse = call.a.lse;
      ASSERT_EQ(call.run(true).code, 0);
      EXPECT_TRUE(call.a.o.same_bits(o) && call.a.lse.same_bits(lse));
    }
}

/// Lengths alike and far apart, so that keys are shared out in pieces and in stretches; of few and of many tiles.
TEST_F(GpuLatent, replays_read_other_lengths) {
  Latent call({3000, 3000, 3000}, 1, 4);
  const TestStream stream;
  DeviceCall gpu(call.a.in(), call.a.out(), call.a.options);
  call.share(gpu);
  gpu.options.stream = stream.handle();
  prepare(gpu.in, gpu.options);
  const Graph graph(stream, [&] { gpu.run(); });
  for (const std::vector<double>& lengths :
       {std::vector<double>{3000, 3000, 3000}, {3000, 0, 100}, {1, 64, 65}, {0, 0, 0}, {2900, 3000, 2950}}) {
    for (std::int64_t b = 0; b < 3; ++b) call.filled.set({b}, lengths[static_cast<std::size_t>(b)]);
    gpu.upload(gpu.options.cache_seqlens);
    graph.replay(stream);
    gpu.download();
    EXPECT_EQ(gpu.status().code, 0);
    EXPECT_TRUE(forward_agrees(call.a.in(), call.a.out(), call.a.options));
    const Array o = call.a.o, lse = call.a.lse;
    for (int repeat = 0; repeat < 10; ++repeat) {
      gpu.run();
      gpu.download();
      ASSERT_TRUE(call.a.o.same_bits(o) && call.a.lse.same_bits(lse)) << "repeat " << repeat;
    }
  }
}

TEST_F(GpuLatent, more_sequences_than_threads) {
  std::vector<double> lengths;
  for (int s = 0; s < 450; ++s) lengths.push_back(s % 150 == 7 ? 700 : s * 37 % 70);
  Latent call(lengths, 1, 2, 16);
  ASSERT_EQ(call.run(true).code, 0);
  EXPECT_TRUE(forward_agrees(call.a.in(), call.a.out(), call.a.options));
}

TEST_F(GpuLatent, an_entry_that_is_no_page_makes_its_sequence_nan) {
  Latent legal({40, 100, 300}, 2, 40, 16), call({40, 100, 300}, 2, 40, 16);
  ASSERT_EQ(legal.run(true).code, 0);
  const int pages = static_cast<int>(call.a.k.shape()[0]);
  call.table.set({1, 3}, pages);
  expect_status(call.run(true), {19, 1, pages, pages - 1});
  call.a.o.for_each([&](const Dims& at) {
    ASSERT_TRUE(at[0] == 1 ? std::isnan(call.a.o[at]) : call.a.o[at] == legal.a.o[at]) << to_text(at);
  });
  call.a.lse.for_each([&](const Dims& at) { ASSERT_EQ(std::isnan(call.a.lse[at]), at[0] == 1) << to_text(at); });
}

}  // namespace
}  // namespace narrows::test
