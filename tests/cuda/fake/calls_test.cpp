// Calls as the driver gets them, by the stand-in for it: grids, arguments, what is cleared before a kernel.
#include <cstring>
#include <utility>

#include <gmock/gmock.h>

#include <narrows/narrows.hpp>

#include "cuda/decode.hpp"
#include "cuda/kernel.hpp"
#include "cuda/machine.hpp"
#include "plan/sm80_decode.hpp"
#include "plan/sm90.hpp"
#include "shared/cached_forward_args.h"
#include "tests/cuda/fake/driver.hpp"

namespace narrows::cuda {
namespace {

using ::testing::ElementsAre;

/// Addresses of nothing.
Tensor on_hopper(int number, DType dtype, const Dims& shape) {
  return {reinterpret_cast<void*>(std::uintptr_t{1} << (24 + number)), dtype, shape, {}, {DeviceKind::cuda, 1}};
}

/// Its tiles, grid and counter; what the copy engine was told last is O.
TEST_F(FakeDriver, ACallOnHopperIsLaunched) {
  const Tensor q = on_hopper(1, DType::bf16, {4, 300, 24, 24}), k = on_hopper(2, DType::bf16, {4, 2100, 8, 24});
  const Outputs out{on_hopper(3, DType::bf16, {4, 300, 24, 24}), on_hopper(4, DType::fp32, {4, 24, 300})};
  Options options;
  options.causal = Causal::bottom_right;
  options.stream = kStream;
  const Call call = make_forward({q, k, k}, out, options);
  packed(forward_sm90_program(forward_sm90_constants(call.problem)));
  state().argument_bytes = sizeof(ForwardSm90Args);
  state().filled.clear();
  forward({q, k, k}, out, options);
  state().argument_bytes = fake::kArgumentBytes;
  // 2 blocks of 192 rows of 96 heads, by 12 warps that compute and 4 that bring.
  EXPECT_THAT(state().launch, ElementsAre(132u, 512u, static_cast<unsigned>(142176)));
  ForwardSm90Args args;
  ASSERT_EQ(state().argument.size(), sizeof args);
  std::memcpy(static_cast<void*>(&args), state().argument.data(), sizeof args);
  EXPECT_EQ(args.tiles, 192u);
  EXPECT_EQ(args.order.pairs, 96u);
  EXPECT_EQ(args.heads_divisor.value, 24u);
  EXPECT_EQ(args.group_divisor.value, 3u);
  EXPECT_EQ(args.blocks, 2);
  EXPECT_EQ(args.section, 96);
  EXPECT_EQ(args.group, 3);
  EXPECT_EQ(args.head_dim, 24);
  EXPECT_EQ(args.visibility.right, 0);
  EXPECT_EQ(args.o_map.bytes[0], 7);
  EXPECT_EQ(args.o.strides[1], 24 * 24 * 2);
  ASSERT_EQ(state().filled.size(), 1u) << "the counter alone";
  EXPECT_EQ(state().filled[0], std::make_pair(reinterpret_cast<unsigned long long>(args.tiles_taken), std::size_t{64}));
  EXPECT_THAT(state().map.sizes, ElementsAre(24u, 300u, 24u, 4u));
  EXPECT_THAT(state().map.box, ElementsAre(64u, 64u, 1u, 1u));

  options.causal = Causal::none;  // tiles of one length: no counter
  const Call whole = make_forward({q, k, k}, out, options);
  packed(forward_sm90_program(forward_sm90_constants(whole.problem)));
  state().argument_bytes = sizeof(ForwardSm90Args);
  state().filled.clear();
  forward({q, k, k}, out, options);
  state().argument_bytes = fake::kArgumentBytes;
  EXPECT_THAT(state().launch, ElementsAre(132u, 512u, static_cast<unsigned>(140640)));
  EXPECT_TRUE(state().filled.empty());
}

/// Its boxes, and the call as kernels of caches have it.
TEST_F(FakeDriver, APromptOverPagesIsLaunched) {
  for (const bool padded : {false, true}) {
    const Tensor q = on_hopper(1, DType::bf16, {2, 300, 8, 128}), pool = on_hopper(2, DType::bf16, {50, 48, 2, 128});
    const Outputs out{on_hopper(3, DType::bf16, {2, 300, 8, 128}), on_hopper(4, DType::fp32, {2, 8, 300})};
    Options options;
    options.cache_seqlens = on_hopper(5, DType::int32, {2});
    options.block_table = on_hopper(6, DType::int32, {2, 20});
    if (padded) options.leftpad = on_hopper(7, DType::int32, {2});
    options.stream = kStream;
    options.family = "sm90";
    const Call call = make_forward({q, pool, pool}, out, options);
    packed(forward_sm90_program(forward_sm90_constants(call.problem)));
    state().argument_bytes = sizeof(CachedForwardArgs);
    forward({q, pool, pool}, out, options);
    state().argument_bytes = fake::kArgumentBytes;
    CachedForwardArgs args;
    ASSERT_EQ(state().argument.size(), sizeof args);
    std::memcpy(static_cast<void*>(&args), state().argument.data(), sizeof args);
    EXPECT_EQ(args.box_rows, padded ? 0 : 16) << "of 48 slots and 128 keys";
    EXPECT_EQ(args.boxes, padded ? 0 : 8);
    EXPECT_EQ(args.k_map.bytes[0] == 0, padded) << "the engine brings none";
    EXPECT_TRUE(args.cache.cached);
    EXPECT_EQ(args.cache.table, static_cast<const i32*>(options.block_table.data));
    EXPECT_EQ(args.cache.table_row, 20);
    EXPECT_EQ(args.cache.pages, 50);
    EXPECT_EQ(args.cache.capacity, 960);
    EXPECT_EQ(args.cache.by_page.divide(99).quotient, 2);
    EXPECT_EQ(args.cache.leftpad.data != nullptr, padded);
    EXPECT_EQ(args.cache.query_rows, 300);
    EXPECT_EQ(args.tiles, 3u * 2 * 8);
  }
}

/// A packed call that decodes, of so many sequences of a cache of 64 slots.
struct PackedDecode {
  Inputs in;
  Outputs out;
  Options options;

  explicit PackedDecode(std::int64_t batch, std::int64_t rows, std::int64_t heads = 8, std::int64_t kv_heads = 2) {
    in = {on_hopper(1, DType::bf16, {rows, heads, 128}), on_hopper(2, DType::bf16, {batch, 64, kv_heads, 128}),
          on_hopper(3, DType::bf16, {batch, 64, kv_heads, 128})};
    out = {on_hopper(4, DType::bf16, {rows, heads, 128}), on_hopper(5, DType::fp32, {heads, rows})};
    options.cu_seqlens_q = on_hopper(6, DType::int32, {batch + 1});
    options.cache_seqlens = on_hopper(7, DType::int32, {batch});
    options.stream = kStream;
    options.family = "sm80";
  }
  Call call() const { return make_forward(in, out, options); }
};

Plan decode_plan(const Call& call) {
  return std::get<Plan>(consider_sm80_decode(call.problem, work(call), machine(call.problem.device)));
}

TEST_F(FakeDriver, RowsOfNoSequenceAreLaunched) {
  const PackedDecode packed_call(0, 5);
  const Call call = packed_call.call();
  packed(decode_program(decode_constants(call.problem, decode_plan(call))));
  state().launch.clear();
  state().argument_bytes = sizeof(DecodeArgs);
  forward(packed_call.in, packed_call.out, packed_call.options);
  state().argument_bytes = fake::kArgumentBytes;
  DecodeArgs args;
  ASSERT_EQ(state().argument.size(), sizeof args);
  std::memcpy(static_cast<void*>(&args), state().argument.data(), sizeof args);
  EXPECT_EQ(args.query_rows, 5);
  EXPECT_EQ(args.cache_seqlens.data, nullptr) << "there is none to read ahead";
}

/// On the device: an address that nothing here looks at.
std::byte* scratch_address() { return reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40); }

/// Numbers of a packed call's rows are bounded together, and not as if each sequence had all of them.
TEST_F(FakeDriver, SequencesOfAPackedCallThatDecodes) {
  const Call call = PackedDecode(4096, 1 << 20, 32, 8).call();
  const DecodeArgs args = decode_args(call.problem, decode_plan(call), call.buffers, scratch_address());
  EXPECT_EQ(args.plain_filled, -1);
  EXPECT_EQ(args.by_rows.divisor, 1);
  EXPECT_EQ(args.by_sequence_rows.divisor, 1);
}

/// Marks are read where the appending kernel has written them.
TEST_F(FakeDriver, MarksOfRefusedSequences) {
  std::byte* const scratch = scratch_address();
  for (const std::int64_t rows : {0, 1}) {
    PackedDecode decode(2, 3);
    decode.options.block_table = on_hopper(8, DType::int32, {2, 4});
    decode.options.k_new = decode.options.v_new = on_hopper(9, DType::bf16, {2, rows, 2, 128});
    const Call call = decode.call();
    const Plan plan = decode_plan(call);
    const DecodeArgs args = decode_args(call.problem, plan, call.buffers, scratch);
    ASSERT_NE(args.outputs, nullptr);
    const i64 before =
        plan.workspace_bytes() - plan.workspace[static_cast<std::size_t>(Sm80DecodeRegion::refused)].bytes;
    EXPECT_EQ(args.refused, rows ? reinterpret_cast<i32*>(scratch + before) : nullptr);
  }
}

/// A call of no query head launches nothing but what appends, a thread block for each new row.
TEST_F(FakeDriver, RowsAreAppendedWithoutAQueryHead) {
  PackedDecode decode(2, 3, 0, 2);
  decode.options.k_new = decode.options.v_new = on_hopper(8, DType::bf16, {2, 3, 2, 128});
  packed(append_program(Element::bf16));
  state().launch.clear();
  state().argument_bytes = sizeof(DecodeArgs);
  forward(decode.in, decode.out, decode.options);
  state().argument_bytes = fake::kArgumentBytes;
  EXPECT_THAT(state().launch, ElementsAre(2u * 3, 32u * kAppendWarps, 0u));
}

TEST_F(FakeDriver, NothingIsAppendedToNoHeads) {
  PackedDecode decode(2, 3, 0, 0);
  decode.options.k_new = decode.options.v_new = on_hopper(8, DType::bf16, {2, 1, 0, 128});
  state().launch.clear();
  forward(decode.in, decode.out, decode.options);
  EXPECT_TRUE(state().launch.empty());
}

}  // namespace
}  // namespace narrows::cuda
