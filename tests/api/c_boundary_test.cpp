#include "api/c_boundary.hpp"

#include "api/c_structs.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace narrows::boundary {
namespace {

template <class Body> std::string refusal(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no Error";
}

TEST(CBoundary, guard_turns_every_exception_into_a_status_and_a_text) {
  const auto code = [](ErrorCode value) { return guard([&] { throw Error(value, "q: text"); }); };
  EXPECT_EQ(code(ErrorCode::invalid_value), narrows_invalid_value);
  EXPECT_EQ(code(ErrorCode::invalid_type), narrows_invalid_type);
  EXPECT_EQ(code(ErrorCode::not_implemented), narrows_not_implemented);
  EXPECT_EQ(code(ErrorCode::out_of_memory), narrows_out_of_memory);
  EXPECT_EQ(code(ErrorCode::invalid_file), narrows_invalid_file);
  EXPECT_EQ(code(ErrorCode::internal), narrows_internal);
  EXPECT_STREQ(last_error(), "q: text");
  EXPECT_EQ(guard([] { throw std::bad_alloc(); }), narrows_out_of_memory);
  EXPECT_STREQ(last_error(), "out of memory");
  EXPECT_EQ(guard([] { throw std::length_error("too long"); }), narrows_internal);
  EXPECT_STREQ(last_error(), "too long");
  EXPECT_EQ(guard([] { throw 7; }), narrows_internal);
  EXPECT_STREQ(last_error(), "an exception of unknown type");
  EXPECT_EQ(guard([] {}), narrows_ok);
  EXPECT_STREQ(last_error(), "");
}

TEST(CBoundary, a_text_beyond_the_room_for_it_ends_in_dots) {
  set_last_error(std::string(4095, 'a'));
  EXPECT_EQ(last_error(), std::string(4095, 'a'));
  set_last_error(std::string(4096, 'b'));
  EXPECT_EQ(last_error(), std::string(4092, 'b').append("..."));
}

struct First {
  std::size_t struct_size;
  std::int64_t a;
};
struct Second {
  std::size_t struct_size;
  std::int64_t a;
  std::int64_t b;
};
struct Third {
  std::size_t struct_size;
  std::int64_t a;
  std::int64_t b;
  std::int64_t c;
};

TEST(CBoundary, fields_that_an_older_caller_lacks_are_zero) {
  const First older{sizeof(First), 5};
  const Second known = read_struct(reinterpret_cast<const Second*>(&older), "options", sizeof(First));
  EXPECT_EQ(known.a, 5);
  EXPECT_EQ(known.b, 0);
}

TEST(CBoundary, a_newer_caller_is_understood_as_long_as_its_new_fields_are_zero) {
  const Third newer{sizeof(Third), 5, 6, 0};
  const Second known = read_struct(reinterpret_cast<const Second*>(&newer), "options", sizeof(First));
  EXPECT_EQ(known.a, 5);
  EXPECT_EQ(known.b, 6);
  const Third asks_more{sizeof(Third), 5, 6, std::int64_t{1} << 56};
  EXPECT_EQ(refusal([&] { read_struct(reinterpret_cast<const Second*>(&asks_more), "options", sizeof(First)); }),
            text("options.struct_size: 32: a field beyond the 24 bytes that this library (", version(),
                 ") knows is set; nearest legal: 24"));
}

TEST(CBoundary, sizes_that_no_release_had_are_refused_and_nothing_behind_them_is_read) {
  for (const std::size_t size : {std::size_t{0}, std::size_t{8}, std::size_t{15}, std::size_t{17}, std::size_t{23},
                                 std::size_t{24 + 4096 + 8}, std::numeric_limits<std::size_t>::max()}) {
    const Second wrong{size, 5, 6};
    EXPECT_EQ(refusal([&] { read_struct(&wrong, "options", sizeof(First)); }),
              "options.struct_size: " + std::to_string(size) +
                  ": must be the sizeof of the struct in the caller's header; nearest legal: 24");
  }
}

TEST(CBoundary, a_result_fills_what_the_callers_struct_has_room_for) {
  Second older{sizeof(First), 0, 77};
  write_struct(&older, Second{sizeof(Second), 5, 6});
  EXPECT_EQ(older.struct_size, sizeof(First));
  EXPECT_EQ(older.a, 5);
  EXPECT_EQ(older.b, 77);
  Third newer{sizeof(Third), 0, 0, 0};
  write_struct(reinterpret_cast<Second*>(&newer), Second{sizeof(Second), 5, 6});
  EXPECT_EQ(newer.struct_size, sizeof(Third));
  EXPECT_EQ(newer.b, 6);
  EXPECT_EQ(newer.c, 0);
}

/// The n-th of the tensors below, told from the others by its one size.
narrows_tensor numbered(std::vector<std::byte>& memory, std::int64_t n) {
  return narrows_view(&memory[static_cast<std::size_t>(n)], narrows_uint8, 1, &n);
}

TEST(CStructs, every_tensor_arrives_under_its_own_name) {
  std::vector<std::byte> memory(64);
  narrows_options given = narrows_options_default();
  const std::vector<narrows_tensor*> c{&given.alibi_slopes,  &given.bias,
                                       &given.sinks,         &given.shift,
                                       &given.mask,          &given.seed_tensor,
                                       &given.offset_tensor, &given.cu_seqlens_q,
                                       &given.cu_seqlens_k,  &given.seqused_q,
                                       &given.seqused_k,     &given.cache_seqlens,
                                       &given.block_table,   &given.cache_batch_idx,
                                       &given.leftpad,       &given.k_new,
                                       &given.v_new,         &given.cu_seqlens_k_new,
                                       &given.rotary_cos,    &given.rotary_sin,
                                       &given.rotary_base,   &given.workspace,
                                       &given.status,        &given.key_begin,
                                       &given.key_end};
  for (std::size_t n = 0; n < c.size(); ++n) *c[n] = numbered(memory, static_cast<std::int64_t>(n) + 1);
  const Options read = options_from(&given);
  const std::vector<const Tensor*> cpp{&read.alibi_slopes,  &read.bias,
                                       &read.sinks,         &read.shift,
                                       &read.mask,          &read.seed.tensor,
                                       &read.offset.tensor, &read.cu_seqlens_q,
                                       &read.cu_seqlens_k,  &read.seqused_q,
                                       &read.seqused_k,     &read.cache_seqlens,
                                       &read.block_table,   &read.cache_batch_idx,
                                       &read.leftpad,       &read.k_new,
                                       &read.v_new,         &read.cu_seqlens_k_new,
                                       &read.rotary_cos,    &read.rotary_sin,
                                       &read.rotary_base,   &read.workspace,
                                       &read.status,        &read.key_begin,
                                       &read.key_end};
  ASSERT_EQ(cpp.size(), c.size());
  for (std::size_t n = 0; n < cpp.size(); ++n) {
    EXPECT_EQ(cpp[n]->data, &memory[n + 1]) << n;
    EXPECT_EQ(cpp[n]->shape, Dims{static_cast<std::int64_t>(n) + 1}) << n;
    EXPECT_EQ(cpp[n]->dtype, DType::uint8) << n;
  }
}

TEST(CStructs, every_number_and_flag_arrives_under_its_own_name) {
  narrows_options given = narrows_options_default();
  given.scale = 0.5;
  given.has_scale = 1;
  given.softcap = 2.5;
  given.causal = narrows_causal_top_left;
  given.has_window = 1;
  given.window_left = 3;
  given.window_right = -1;
  given.chunk = 5;
  given.dropout = 0.25;
  given.seed = 6;
  given.offset = 7;
  given.origin_b = 8;
  given.origin_h = 9;
  given.origin_i = 10;
  given.origin_j = 11;
  given.origin_H = 12;
  given.num_splits = 13;
  given.threads = 14;
  given.family = "cpu";
  given.stream = &given;
  const Options read = options_from(&given);
  EXPECT_EQ(read.scale, 0.5);
  EXPECT_EQ(read.softcap, 2.5);
  EXPECT_EQ(read.causal, Causal::top_left);
  EXPECT_EQ(read.window.left, 3);
  EXPECT_EQ(read.window.right, -1);
  EXPECT_EQ(read.chunk, 5);
  EXPECT_EQ(read.dropout, 0.25);
  EXPECT_EQ(read.seed.value, 6u);
  EXPECT_EQ(read.offset.value, 7u);
  EXPECT_EQ(read.origin.b, 8);
  EXPECT_EQ(read.origin.h, 9);
  EXPECT_EQ(read.origin.i, 10);
  EXPECT_EQ(read.origin.j, 11);
  EXPECT_EQ(read.origin.H, 12);
  EXPECT_EQ(read.num_splits, 13);
  EXPECT_EQ(read.threads, 14);
  EXPECT_EQ(read.family, "cpu");
  EXPECT_EQ(read.stream, &given);
}

TEST(CStructs, each_flag_sets_its_option_alone) {
  const auto flags = [](const Options& options) {
    return std::vector<bool>{options.rotary_interleaved, options.deterministic, options.batch_invariant, options.check};
  };
  const std::vector<std::int32_t narrows_options::*> fields{&narrows_options::rotary_interleaved,
                                                            &narrows_options::deterministic,
                                                            &narrows_options::batch_invariant, &narrows_options::check};
  for (std::size_t n = 0; n < fields.size(); ++n) {
    narrows_options given = narrows_options_default();
    given.*fields[n] = 1;
    std::vector<bool> expected(fields.size(), false);
    expected[n] = true;
    EXPECT_EQ(flags(options_from(&given)), expected) << n;
  }
}

TEST(CStructs, defaults_are_those_of_cpp) {
  const narrows_options zero = narrows_options_default();
  const Options defaults;
  for (const narrows_options* given : {static_cast<const narrows_options*>(nullptr), &zero}) {
    const Options read = options_from(given);
    EXPECT_EQ(read.scale, defaults.scale);
    EXPECT_EQ(read.softcap, defaults.softcap);
    EXPECT_EQ(read.causal, defaults.causal);
    EXPECT_EQ(read.window.left, -1);
    EXPECT_EQ(read.window.right, -1);
    EXPECT_EQ(read.chunk, defaults.chunk);
    EXPECT_EQ(read.dropout, defaults.dropout);
    EXPECT_EQ(read.num_splits, defaults.num_splits);
    EXPECT_EQ(read.threads, defaults.threads);
    EXPECT_TRUE(read.family.empty());
    EXPECT_EQ(read.stream, nullptr);
    EXPECT_FALSE(read.mask.given() || read.bias.given() || read.cu_seqlens_q.given() || read.workspace.given());
  }
}

TEST(CStructs, a_tensor_keeps_its_dtype_strides_and_device) {
  float memory[6] = {};
  const std::int64_t shape[] = {2, 3};
  narrows_inputs given = narrows_inputs_default();
  given.k = narrows_view(memory, narrows_bf16, 2, shape);
  given.k.has_strides = 1;
  given.k.strides[0] = -1;
  given.k.strides[1] = 2;
  given.k.device_kind = narrows_cuda;
  given.k.device_index = 3;
  const Inputs read = inputs_from(&given);
  EXPECT_FALSE(read.q.given());
  EXPECT_EQ(read.k.data, memory);
  EXPECT_EQ(read.k.dtype, DType::bf16);
  EXPECT_EQ(read.k.shape, (Dims{2, 3}));
  EXPECT_EQ(read.k.strides, (Dims{-1, 2}));
  EXPECT_EQ(read.k.device, (Device{DeviceKind::cuda, 3}));
  EXPECT_FALSE(read.v.given());
}

}  // namespace
}  // namespace narrows::boundary
