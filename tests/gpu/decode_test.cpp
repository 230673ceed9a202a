// KV caches on a GPU: random calls against the oracle and by counting, lengths and tables that break a rule, growing caches, and
// bits that do not depend on how keys are shared out.
#include "tests/cpu/cache_call.hpp"
#include "tests/gpu/paged.hpp"

namespace narrows::test {
namespace {

class GpuCacheRandom : public OnGpu<testing::TestWithParam<int>> {
 protected:
  /// body(seed, call) of calls that a GPU computes, on few splits, many, and as many as the plan likes.
  template <class Body> void each_call(bool counting, const Body& body) {
    for (int round = 0; round < 12; ++round) {
      const std::uint64_t seed = static_cast<std::uint64_t>(GetParam()) * 1000 + static_cast<std::uint64_t>(round);
      CacheCall call(seed, counting);
      if (call.a.q.dtype() == DType::fp64) continue;
      call.a.options.num_splits = std::array{0, 1, 3, 0}[static_cast<std::size_t>(round % 4)];
      call.a.options.batch_invariant = round % 4 == 3;
      call.a.options.family = "sm80";
      SCOPED_TRACE(seed);
      body(call.a);
    }
  }
};

/// What is rotated may differ by rounding, all else must be the same.
void expect_same_cache(const Array& ours, const Array& exact) {
  const double tolerance = ours.dtype() == DType::bf16 ? 0x1p-7 : ours.dtype() == DType::fp16 ? 0x1p-10 : 1e-5;
  ours.for_each([&](const Dims& at) {
    const double a = ours[at], b = exact[at];
    const bool same = std::isnan(b) ? std::isnan(a) : std::abs(a - b) <= tolerance * std::max(1.0, std::abs(b));
    ASSERT_TRUE(same) << to_text(at) << ": " << a << ", not " << b;
  });
  EXPECT_TRUE(ours.gaps_intact());
}

TEST_P(GpuCacheRandom, agrees_with_the_oracle) {
  each_call(false, [](Attention& a) {
    Array k = a.k, v = a.v, o = a.o;
    reference::forward({a.q, k, v}, {o, {}}, a.options);
    DeviceCall gpu(a.in(), a.out(), a.options);
    gpu.run();
    gpu.download();
    EXPECT_EQ(gpu.status().code, 0);
    expect_within_bounds(a);
    expect_same_cache(a.k, k);
    expect_same_cache(a.v, v);
    EXPECT_TRUE(a.o.gaps_intact());
    EXPECT_TRUE(gpu.surroundings_intact());
  });
}

TEST_P(GpuCacheRandom, counting_shows_exactly_the_visible_keys) {
  each_call(true, [](Attention& a) {
    const reference::ForwardResult exact = reference::exact_forward(a.in(), a.options);
    DeviceCall gpu(a.in(), a.out(), a.options);
    gpu.run();
    gpu.download();
    const std::vector<double> lse = a.lse.values(), o = a.o.values();
    const bool varlen = a.q.shape().rank() == 3;
    const std::int64_t h = a.q.shape()[varlen ? 1 : 2], sq = a.q.shape()[varlen ? 0 : 1];
    const std::size_t dv = static_cast<std::size_t>(a.o.shape()[a.o.shape().rank() - 1]);
    for (std::size_t element = 0; element < lse.size(); ++element) {
      const double keys = std::round(std::exp(exact.lse.value[element]));
      ASSERT_EQ(std::round(std::exp(lse[element])), keys) << "LSE element " << element;
      const std::int64_t e = static_cast<std::int64_t>(element), i = e % sq, head = e / sq % h, b = e / sq / h;
      const std::size_t first = static_cast<std::size_t>((b * sq + i) * h + head) * dv;
      for (std::size_t c = first; c < first + dv; ++c)
        ASSERT_EQ(std::round(o[c] * keys), std::round(exact.o.value[c] * keys)) << "O element " << c;
    }
  });
}
INSTANTIATE_TEST_SUITE_P(Seeds, GpuCacheRandom, testing::Range(0, 4));

struct CacheBreach {
  const char* name;
  void (*breaks)(Paged& call);
  CallStatus status;
};

using GpuCache = GpuTest;

TEST_F(GpuCache, a_sequence_that_breaks_a_rule_is_nan_and_the_others_are_whole) {
  const Array rows = int32_array({0, 3, 2}), pads = int32_array({0, 101, 0});
  static const Array *row_of = &rows, *pad_of = &pads;
  const std::vector<CacheBreach> breaches{
      {"more slots than there are", [](Paged& call) { call.filled.set({1}, 321); }, {15, 1, 321, 320}},
      {"far more slots", [](Paged& call) { call.filled.set({1}, kMost); }, {15, 1, kMost, 320}},
      {"slots negative", [](Paged& call) { call.filled.set({1}, kLeast); }, {15, 1, kLeast, 320}},
      {"no row of the table", [](Paged& call) { call.a.options.cache_batch_idx = *row_of; }, {16, 1, 3, 2}},
      {"more padding than slots", [](Paged& call) { call.a.options.leftpad = *pad_of; }, {17, 1, 101, 100}},
      {"no page",
       [](Paged& call) {
         call.table.set({1, 3}, 60);
       },
       {19, 1, 60, 59}},
      {"a page below 0",
       [](Paged& call) {
         call.table.set({1, 0}, -1);
       },
       {19, 1, -1, 59}}};
  for (const std::int64_t queries : {1, 5}) {
    Paged legal({40, 100, 300}, queries);
    legal.a.options.batch_invariant = true;  // keys of the others are shared out alike
    ASSERT_EQ(legal.run().code, 0);
    for (const CacheBreach& breach : breaches) {
      SCOPED_TRACE(breach.name);
      Paged call({40, 100, 300}, queries);
      call.a.options.batch_invariant = true;
      breach.breaks(call);
      expect_status(call.run(), breach.status);
      call.a.lse.for_each([&](const Dims& at) {
        ASSERT_TRUE(at[0] == 1 ? std::isnan(call.a.lse[at]) : call.a.lse[at] == legal.a.lse[at]) << to_text(at);
      });
      call.a.o.for_each([&](const Dims& at) {
        ASSERT_TRUE(at[0] == 1 ? std::isnan(call.a.o[at]) : call.a.o[at] == legal.a.o[at]) << to_text(at);
      });
    }
  }
}

TEST_F(GpuCache, entries_of_pages_that_no_row_sees_are_not_read) {
  Paged call({100, 300}, 2);
  ASSERT_EQ(call.run().code, 0);
  call.a.options.window.left = 20;
  ASSERT_EQ(call.run().code, 0);
  const Array o = call.a.o;
  for (const std::int64_t page : {0, 3, 7, 19}) call.table.set({0, page}, kMost);
  for (const std::int64_t page : {0, 16, 19}) call.table.set({1, page}, -1);
  EXPECT_EQ(call.run().code, 0);
  EXPECT_TRUE(call.a.o.same_bits(o));
}

TEST_F(GpuCache, H02_nothing_is_appended_to_a_sequence_that_has_no_room) {
  Paged call({40, 319, 300}, 2);
  const Array k_new = call.fresh(0, 2, true), v_new = call.fresh(0, 2, false), before = call.a.k;
  call.a.options.k_new = k_new;
  call.a.options.v_new = v_new;
  expect_status(call.run(), {18, 1, 319, 318});
  EXPECT_TRUE(std::isnan(call.a.lse[{1, 3, 1}]));
  EXPECT_FALSE(std::isnan(call.a.lse[{0, 0, 0}]) || std::isnan(call.a.lse[{2, 3, 1}]));
  int changed = 0;
  call.a.k.for_each([&](const Dims& at) {
    const double now = call.a.k[at], then = before[at];
    if (now == then || (std::isnan(now) && std::isnan(then))) return;
    ++changed;
    ASSERT_NE(at[0], static_cast<std::int64_t>(call.table[{1, 19}])) << to_text(at);
  });
  EXPECT_EQ(changed, 2 * 2 * 2 * 64) << "two sequences, two keys, two kv heads";
}

/// One graph, replayed while the cache grows: each step appends a key and attends to all so far. Afterwards what each step had
/// must be what one call on all has: bit for bit with batch_invariant.
void expect_steps_as_one_call(bool invariant) {
  constexpr std::int64_t kSteps = 1000, kBefore = 250, kPages = 80;
  Paged whole({kBefore + kSteps, kBefore + kSteps}, kSteps, DType::bf16, kPages);
  Paged grown({kBefore, kBefore}, 1, DType::bf16, kPages);
  whole.a.options.batch_invariant = grown.a.options.batch_invariant = invariant;
  if (invariant) {
    ASSERT_EQ(whole.run().code, 0);
  }
  Array k_new = grown.fresh(kBefore, 1, true), v_new = grown.fresh(kBefore, 1, false);
  grown.a.options.k_new = k_new;
  grown.a.options.v_new = v_new;
  const TestStream stream;
  DeviceCall gpu(grown.a.in(), grown.a.out(), grown.a.options);
  gpu.options.stream = stream.handle();
  prepare(gpu.in, gpu.options);
  const Graph graph(stream, [&] { gpu.run(); });
  for (std::int64_t step = 0; step < kSteps; ++step) {
    SCOPED_TRACE(step);
    grown.a.q.fill([&](const Dims& at) { return whole.a.q[{at[0], step, at[2], at[3]}]; });
    k_new.fill([&](const Dims& at) { return Paged::key(kBefore + step, at[2], at[3]); });
    v_new.fill([&](const Dims& at) { return Paged::value(kBefore + step, at[2], at[3]); });
    for (std::int64_t b = 0; b < 2; ++b) grown.filled.set({b}, static_cast<double>(kBefore + step));
    for (const Tensor& tensor : {gpu.in.q, gpu.options.k_new, gpu.options.v_new, gpu.options.cache_seqlens})
      gpu.upload(tensor);
    graph.replay(stream);
    gpu.download();
    ASSERT_EQ(gpu.status().code, 0);
    if (invariant) {
      grown.a.o.for_each([&](const Dims& at) {
        ASSERT_EQ(grown.a.o[at], (whole.a.o[{at[0], step, at[2], at[3]}])) << to_text(at);
      });
      grown.a.lse.for_each([&](const Dims& at) { ASSERT_EQ(grown.a.lse[at], (whole.a.lse[{at[0], at[1], step}])); });
    } else {
      for (const Array* result : {&grown.a.o, &grown.a.lse})
        for (const double x : result->values()) ASSERT_TRUE(std::isfinite(x));
      if (step % 111 == 0) {
        ASSERT_NO_FATAL_FAILURE(expect_within_bounds(grown.a));
      }
    }
  }
}

TEST_F(GpuCache, L03_steps_of_a_replayed_graph_have_the_bits_of_one_call) { expect_steps_as_one_call(true); }
TEST_F(GpuCache, H09_steps_of_a_replayed_graph_are_within_bounds) { expect_steps_as_one_call(false); }

/// With the lengths that are on the host now.
void expect_replay(const Attention& a, DeviceCall& gpu, const Graph& graph, const TestStream& stream) {
  gpu.upload(gpu.options.cache_seqlens);
  graph.replay(stream);
  gpu.download();
  EXPECT_EQ(gpu.status().code, 0);
  expect_within_bounds(a);
  const Array o = a.o, lse = a.lse;
  gpu.run();
  gpu.download();
  EXPECT_TRUE(a.o.same_bits(o) && a.lse.same_bits(lse));
}

/// Lengths far apart and alike, so that keys are shared out in stretches and in pieces: bit for bit as a call of its own.
void expect_replays(DType dtype) {
  Paged call({320, 320, 320, 320, 320}, 1, dtype);
  const TestStream stream;
  DeviceCall gpu(call.a.in(), call.a.out(), call.a.options);
  gpu.options.stream = stream.handle();
  prepare(gpu.in, gpu.options);
  const Graph graph(stream, [&] { gpu.run(); });
  for (const std::vector<double>& lengths :
       {std::vector<double>{320, 320, 320, 320, 320}, {0, 1, 17, 320, 5}, {0, 0, 0, 0, 0}, {310, 320, 315, 300, 319}}) {
    for (std::int64_t b = 0; b < 5; ++b) call.filled.set({b}, lengths[static_cast<std::size_t>(b)]);
    expect_replay(call.a, gpu, graph, stream);
  }
}

TEST_F(GpuCache, C16_L04_replays_read_other_lengths) {
  for (const DType dtype : {DType::bf16, DType::fp32}) expect_replays(dtype);
}

/// Rows of 20 sequences that two thread blocks of each multiprocessor stretch over, a line for each kv head: lengths alike, by
/// Zipf's law and in no order.
TEST_F(GpuCache, stretches_over_the_rows_of_eight_kv_heads) {
  constexpr std::int64_t kBatch = 20, kSlots = 208;
  Attention a({kBatch, 1, kSlots, 8, 8, 128, 128}, DType::bf16);
  Array filled(DType::int32, {kBatch});
  a.options.cache_seqlens = filled;
  a.options.causal = Causal::bottom_right;
  a.options.family = "sm80";
  const TestStream stream;
  DeviceCall gpu(a.in(), a.out(), a.options);
  gpu.options.stream = stream.handle();
  prepare(gpu.in, gpu.options);
  const Graph graph(stream, [&] { gpu.run(); });
  for (const int form : {0, 1, 2, 0}) {
    SCOPED_TRACE(form);
    for (std::int64_t b = 0; b < kBatch; ++b)
      filled.set({b}, static_cast<double>(form == 0 ? kSlots : form == 1 ? kSlots / (b + 1) : b * 137 % (kSlots + 1)));
    expect_replay(a, gpu, graph, stream);
  }
}

/// Calls one behind the other on one cache and one scratch: each asks with what the one before has found, and appends it.
class Chain {
 public:
  explicit Chain(DeviceCall& call) : call_(call), lengths_(kSteps * 2 * 4) {
    for (int step = 0; step < kSteps; ++step) {
      const std::array<std::int32_t, 2> filled{250 + step, 200 + step};
      lengths_.upload(filled.data(), 8, 8 * step);
      results_.emplace_back(kBytes);
    }
    workspace_.emplace(workspace_size(call.in, options(0, call.in.q, nullptr)));
  }

  void run(const TestStream& stream, bool waits) {
    Tensor before = call_.in.q;
    for (int step = 0; step < kSteps; ++step) {
      const Tensor result{
          results_[static_cast<std::size_t>(step)].data(), DType::bf16, {2, 1, 4, 64}, {}, before.device};
      forward({before, call_.in.k, call_.in.v}, {result, {}}, options(step, before, stream.handle()));
      if (waits) stream.wait();
      before = result;
    }
  }
  std::vector<std::uint16_t> bits() const {
    std::vector<std::uint16_t> all;
    for (const DeviceBlock& result : results_) {
      std::array<std::uint16_t, kBytes / 2> own{};
      result.download(own.data(), kBytes);
      all.insert(all.end(), own.begin(), own.end());
    }
    return all;
  }

 private:
  static constexpr int kSteps = 24;
  static constexpr std::int64_t kBytes = 2 * 4 * 64 * 2;  // of a result

  /// New keys and values are the first heads of what is asked with.
  Options options(int step, const Tensor& before, void* stream) {
    Options options = call_.options;
    options.stream = stream;
    options.status = {};
    options.cache_seqlens = {lengths_.data() + 8 * step, DType::int32, {2}, {}, before.device};
    options.k_new = options.v_new = {before.data, DType::bf16, {2, 1, 2, 64}, Dims{256, 256, 64, 1}, before.device};
    if (workspace_) options.workspace = {workspace_->data(), DType::uint8, {workspace_->bytes()}, {}, before.device};
    return options;
  }

  DeviceCall& call_;
  DeviceBlock lengths_;
  std::vector<DeviceBlock> results_;
  std::optional<DeviceBlock> workspace_;
};

TEST_F(GpuCache, calls_that_overlap_are_as_calls_with_a_wait_between) {
  Paged call({250, 200}, 1);
  call.a.q.fill_gaussian(3);
  const TestStream stream;
  std::vector<std::uint16_t> alone;
  for (const bool replays : {true, false}) {
    DeviceCall gpu(call.a.in(), call.a.out(), call.a.options);  // a cache without what will be appended
    Chain chain(gpu);
    if (alone.empty()) {
      DeviceCall apart(call.a.in(), call.a.out(), call.a.options);
      Chain waiting(apart);
      waiting.run(stream, true);
      alone = waiting.bits();
    }
    if (replays) {
      const Graph graph(stream, [&] { chain.run(stream, false); });
      for (int replay = 0; replay < 10; ++replay) graph.replay(stream);
    } else {
      chain.run(stream, false);
    }
    stream.wait();
    EXPECT_EQ(chain.bits(), alone) << (replays ? "a graph" : "a stream");
  }
}

TEST_F(GpuCache, K06_batch_invariant_bits_do_not_depend_on_splits_batch_or_pages) {
  for (const DType dtype : {DType::bf16, DType::fp32}) {
    Paged whole({300, 300, 300}, 9, dtype);
    whole.a.options.batch_invariant = true;
    ASSERT_EQ(whole.run().code, 0);
    for (const int splits : {1, 2, 5}) {
      Paged other({300, 300, 300}, 9, dtype);
      other.a.options.batch_invariant = true;
      other.a.options.num_splits = splits;
      ASSERT_EQ(other.run().code, 0);
      EXPECT_TRUE(other.a.o.same_bits(whole.a.o) && other.a.lse.same_bits(whole.a.lse)) << splits << " splits";
    }
    for (const std::int64_t count : {1, 2, 5}) {
      Paged last({300}, count, dtype);
      last.a.options.batch_invariant = true;
      last.a.q.fill([&](const Dims& at) { return whole.a.q[{0, 9 - count + at[1], at[2], at[3]}]; });
      ASSERT_EQ(last.run().code, 0);
      last.a.o.for_each([&](const Dims& at) {
        ASSERT_EQ(last.a.o[at], (whole.a.o[{0, 9 - count + at[1], at[2], at[3]}])) << count << " rows";
      });
    }
  }
}

/// Keys in tensors are split too, where the call asks for it.
TEST_F(GpuCache, num_splits_of_keys_in_tensors) {
  for (const int splits : {2, 7, 100}) {
    Attention a({2, 3, 500, 6, 2, 72, 40}, DType::bf16);
    a.options.num_splits = splits;
    a.options.causal = Causal::bottom_right;
    a.options.family = "sm80";
    DeviceCall gpu(a.in(), a.out(), a.options);
    gpu.run();
    gpu.download();
    EXPECT_TRUE(forward_agrees(a.in(), a.out(), a.options)) << splits;
    EXPECT_TRUE(gpu.surroundings_intact());
  }
}

}  // namespace
}  // namespace narrows::test
