// The binary interface of narrows.h, pinned: a change here breaks programs that were built before it. New fields go to the
// end of a struct and new enumerators get new values: lines are added here and a sizeof grows, no other line is edited.
#include <narrows/narrows.h>
#include <narrows/narrows.hpp>

#include <cstddef>
#include <type_traits>

namespace {

static_assert(sizeof(void*) == 8 && sizeof(size_t) == 8 && sizeof(double) == 8, "the offsets below are for 64 bits");

template <class... Types> constexpr bool all_int32 = (std::is_same_v<Types, std::int32_t> && ...);
static_assert(all_int32<narrows_status, narrows_dtype, narrows_device_kind, narrows_causal>);

static_assert(narrows_ok == 0);
static_assert(narrows_invalid_value == 1);
static_assert(narrows_invalid_type == 2);
static_assert(narrows_not_implemented == 3);
static_assert(narrows_out_of_memory == 4);
static_assert(narrows_invalid_file == 5);
static_assert(narrows_internal == 6);

static_assert(narrows_fp16 == 1);
static_assert(narrows_bf16 == 2);
static_assert(narrows_fp32 == 3);
static_assert(narrows_fp64 == 4);
static_assert(narrows_int32 == 5);
static_assert(narrows_int64 == 6);
static_assert(narrows_uint8 == 7);
static_assert(narrows_boolean == 8);

static_assert(narrows_cpu == 0);
static_assert(narrows_cuda == 1);
static_assert(narrows_causal_none == 0);
static_assert(narrows_causal_bottom_right == 1);
static_assert(narrows_causal_top_left == 2);
static_assert(narrows_max_rank == 5);

// c_api.cpp turns one set of enumerators into the other by arithmetic.
constexpr bool same(narrows_dtype c, narrows::DType cpp) { return c - narrows_fp16 == static_cast<std::int32_t>(cpp); }
static_assert(same(narrows_fp16, narrows::DType::fp16) && same(narrows_bf16, narrows::DType::bf16));
static_assert(same(narrows_fp32, narrows::DType::fp32) && same(narrows_fp64, narrows::DType::fp64));
static_assert(same(narrows_int32, narrows::DType::int32) && same(narrows_int64, narrows::DType::int64));
static_assert(same(narrows_uint8, narrows::DType::uint8) && same(narrows_boolean, narrows::DType::boolean));
static_assert(narrows_cuda == static_cast<std::int32_t>(narrows::DeviceKind::cuda));
static_assert(narrows_causal_bottom_right == static_cast<std::int32_t>(narrows::Causal::bottom_right));
static_assert(narrows_causal_top_left == static_cast<std::int32_t>(narrows::Causal::top_left));
static_assert(narrows_max_rank == narrows::Dims::kMaxRank);

static_assert(std::is_standard_layout_v<narrows_tensor> && std::is_trivially_copyable_v<narrows_tensor>);
static_assert(sizeof(narrows_tensor) == 112);
static_assert(offsetof(narrows_tensor, data) == 0);
static_assert(offsetof(narrows_tensor, dtype) == 8);
static_assert(offsetof(narrows_tensor, rank) == 12);
static_assert(offsetof(narrows_tensor, shape) == 16);
static_assert(offsetof(narrows_tensor, strides) == 56);
static_assert(offsetof(narrows_tensor, has_strides) == 96);
static_assert(offsetof(narrows_tensor, device_kind) == 100);
static_assert(offsetof(narrows_tensor, device_index) == 104);
static_assert(offsetof(narrows_tensor, reserved) == 108);

static_assert(std::is_standard_layout_v<narrows_inputs> && std::is_trivially_copyable_v<narrows_inputs>);
static_assert(sizeof(narrows_inputs) == 344);
static_assert(offsetof(narrows_inputs, struct_size) == 0);
static_assert(offsetof(narrows_inputs, q) == 8);
static_assert(offsetof(narrows_inputs, k) == 120);
static_assert(offsetof(narrows_inputs, v) == 232);

static_assert(std::is_standard_layout_v<narrows_outputs> && std::is_trivially_copyable_v<narrows_outputs>);
static_assert(sizeof(narrows_outputs) == 232);
static_assert(offsetof(narrows_outputs, struct_size) == 0);
static_assert(offsetof(narrows_outputs, o) == 8);
static_assert(offsetof(narrows_outputs, lse) == 120);

static_assert(std::is_standard_layout_v<narrows_backward_inputs> &&
              std::is_trivially_copyable_v<narrows_backward_inputs>);
static_assert(sizeof(narrows_backward_inputs) == 792);
static_assert(offsetof(narrows_backward_inputs, struct_size) == 0);
static_assert(offsetof(narrows_backward_inputs, q) == 8);
static_assert(offsetof(narrows_backward_inputs, k) == 120);
static_assert(offsetof(narrows_backward_inputs, v) == 232);
static_assert(offsetof(narrows_backward_inputs, o) == 344);
static_assert(offsetof(narrows_backward_inputs, lse) == 456);
static_assert(offsetof(narrows_backward_inputs, dout) == 568);
static_assert(offsetof(narrows_backward_inputs, dlse) == 680);

static_assert(std::is_standard_layout_v<narrows_gradients> && std::is_trivially_copyable_v<narrows_gradients>);
static_assert(sizeof(narrows_gradients) == 680);
static_assert(offsetof(narrows_gradients, struct_size) == 0);
static_assert(offsetof(narrows_gradients, dq) == 8);
static_assert(offsetof(narrows_gradients, dk) == 120);
static_assert(offsetof(narrows_gradients, dv) == 232);
static_assert(offsetof(narrows_gradients, dbias) == 344);
static_assert(offsetof(narrows_gradients, dslopes) == 456);
static_assert(offsetof(narrows_gradients, dsinks) == 568);

static_assert(std::is_standard_layout_v<narrows_merge_gradients> &&
              std::is_trivially_copyable_v<narrows_merge_gradients>);
static_assert(sizeof(narrows_merge_gradients) == 128);
static_assert(offsetof(narrows_merge_gradients, struct_size) == 0);
static_assert(offsetof(narrows_merge_gradients, parts) == 8);
static_assert(offsetof(narrows_merge_gradients, dsinks) == 16);

static_assert(std::is_standard_layout_v<narrows_options> && std::is_trivially_copyable_v<narrows_options>);
static_assert(sizeof(narrows_options) == 2968);
static_assert(offsetof(narrows_options, struct_size) == 0);
static_assert(offsetof(narrows_options, scale) == 8);
static_assert(offsetof(narrows_options, has_scale) == 16);
static_assert(offsetof(narrows_options, reserved) == 20);
static_assert(offsetof(narrows_options, softcap) == 24);
static_assert(offsetof(narrows_options, alibi_slopes) == 32);
static_assert(offsetof(narrows_options, bias) == 144);
static_assert(offsetof(narrows_options, sinks) == 256);
static_assert(offsetof(narrows_options, causal) == 368);
static_assert(offsetof(narrows_options, has_window) == 372);
static_assert(offsetof(narrows_options, window_left) == 376);
static_assert(offsetof(narrows_options, window_right) == 384);
static_assert(offsetof(narrows_options, chunk) == 392);
static_assert(offsetof(narrows_options, shift) == 400);
static_assert(offsetof(narrows_options, mask) == 512);
static_assert(offsetof(narrows_options, dropout) == 624);
static_assert(offsetof(narrows_options, seed) == 632);
static_assert(offsetof(narrows_options, offset) == 640);
static_assert(offsetof(narrows_options, seed_tensor) == 648);
static_assert(offsetof(narrows_options, offset_tensor) == 760);
static_assert(offsetof(narrows_options, origin_b) == 872);
static_assert(offsetof(narrows_options, origin_h) == 880);
static_assert(offsetof(narrows_options, origin_i) == 888);
static_assert(offsetof(narrows_options, origin_j) == 896);
static_assert(offsetof(narrows_options, origin_H) == 904);
static_assert(offsetof(narrows_options, cu_seqlens_q) == 912);
static_assert(offsetof(narrows_options, cu_seqlens_k) == 1024);
static_assert(offsetof(narrows_options, seqused_q) == 1136);
static_assert(offsetof(narrows_options, seqused_k) == 1248);
static_assert(offsetof(narrows_options, cache_seqlens) == 1360);
static_assert(offsetof(narrows_options, block_table) == 1472);
static_assert(offsetof(narrows_options, cache_batch_idx) == 1584);
static_assert(offsetof(narrows_options, leftpad) == 1696);
static_assert(offsetof(narrows_options, k_new) == 1808);
static_assert(offsetof(narrows_options, v_new) == 1920);
static_assert(offsetof(narrows_options, cu_seqlens_k_new) == 2032);
static_assert(offsetof(narrows_options, rotary_cos) == 2144);
static_assert(offsetof(narrows_options, rotary_sin) == 2256);
static_assert(offsetof(narrows_options, rotary_base) == 2368);
static_assert(offsetof(narrows_options, rotary_interleaved) == 2480);
static_assert(offsetof(narrows_options, deterministic) == 2484);
static_assert(offsetof(narrows_options, batch_invariant) == 2488);
static_assert(offsetof(narrows_options, num_splits) == 2492);
static_assert(offsetof(narrows_options, check) == 2496);
static_assert(offsetof(narrows_options, threads) == 2500);
static_assert(offsetof(narrows_options, workspace) == 2504);
static_assert(offsetof(narrows_options, status) == 2616);
static_assert(offsetof(narrows_options, family) == 2728);
static_assert(offsetof(narrows_options, stream) == 2736);
static_assert(offsetof(narrows_options, key_begin) == 2744);
static_assert(offsetof(narrows_options, key_end) == 2856);

static_assert(std::is_standard_layout_v<narrows_explanation> && std::is_trivially_copyable_v<narrows_explanation>);
static_assert(sizeof(narrows_explanation) == 152);
static_assert(offsetof(narrows_explanation, struct_size) == 0);
static_assert(offsetof(narrows_explanation, memory) == 8);
static_assert(offsetof(narrows_explanation, problem) == 16);
static_assert(offsetof(narrows_explanation, family) == 24);
static_assert(offsetof(narrows_explanation, plan) == 32);
static_assert(offsetof(narrows_explanation, refused) == 40);
static_assert(offsetof(narrows_explanation, limited_by) == 48);
static_assert(offsetof(narrows_explanation, text) == 56);
static_assert(offsetof(narrows_explanation, visible_pairs) == 64);
static_assert(offsetof(narrows_explanation, flops) == 72);
static_assert(offsetof(narrows_explanation, fused_bytes) == 80);
static_assert(offsetof(narrows_explanation, three_kernel_bytes) == 88);
static_assert(offsetof(narrows_explanation, fused_memory) == 96);
static_assert(offsetof(narrows_explanation, three_kernel_memory) == 104);
static_assert(offsetof(narrows_explanation, fused_intensity) == 112);
static_assert(offsetof(narrows_explanation, three_kernel_intensity) == 120);
static_assert(offsetof(narrows_explanation, predicted_seconds) == 128);
static_assert(offsetof(narrows_explanation, three_kernel_seconds) == 136);
static_assert(offsetof(narrows_explanation, fused_l2_bytes) == 144);

}  // namespace
