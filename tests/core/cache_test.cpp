#include "tests/core/call.hpp"

namespace narrows::test {
namespace {

/// Contiguous cache k (3, 7, 2, 8), v (3, 7, 2, 6) for a batch of 2.
TestCall contiguous() {
  TestCall call = TestCall::dense();
  call.in.k.shape = {3, 7, 2, 8};
  call.in.v.shape = {3, 7, 2, 6};
  return call;
}

TEST(Cache, contiguous_facts) {
  TestCall call = contiguous();
  Ints filled{4, 7}, rows{2, 0}, leftpad{1, 0};
  call.options.cache_seqlens = filled;
  call.options.cache_batch_idx = rows;
  call.options.leftpad = leftpad;
  const Call made = call.make();
  EXPECT_EQ(made.problem.key_form, KeyForm::cache);
  EXPECT_EQ(made.problem.max_keys, 7);
  const Sequence first = sequence(made.problem, made.buffers, 0);
  EXPECT_EQ(first.key_batch, 2);
  EXPECT_EQ(first.first_key, 1);
  EXPECT_EQ(first.keys, 3);
  EXPECT_EQ(first.shift, -2);
}

TEST(Cache, rows_and_values) {
  TestCall call = contiguous();
  Ints filled{4, 8}, fine{4, 7}, rows{3, 0}, leftpad{5, 0};
  call.options.cache_seqlens = fine;
  EXPECT_EQ(call.refusal(),
            "k: 3 rows: must have one for each of the 2 sequences, or cache_batch_idx be given; nearest legal: 2");
  call.options.cache_batch_idx = rows;
  EXPECT_EQ(call.refusal(), "cache_batch_idx[0]: 3: must be in [0, 2], the cache's rows; nearest legal: 2");
  Ints legal_rows{2, 0};
  call.options.cache_batch_idx = legal_rows;
  call.options.cache_seqlens = filled;
  EXPECT_EQ(call.refusal(), "cache_seqlens[1]: 8: must be in [0, 7], the cache's capacity; nearest legal: 7");
  call.options.cache_seqlens = fine;
  call.options.leftpad = leftpad;
  EXPECT_EQ(call.refusal(), "leftpad[0]: 5: must be <= cache_seqlens[0] = 4; nearest legal: 4");
}

TEST(Cache, H02_append_beyond_the_capacity_is_refused) {
  TestCall call = contiguous();
  Ints filled{4, 6}, rows{2, 0};
  call.options.cache_seqlens = filled;
  call.options.cache_batch_idx = rows;
  call.options.k_new = call.tensor({2, 2, 2, 8});
  call.options.v_new = call.tensor({2, 2, 2, 6});
  EXPECT_EQ(call.refusal(), "cache_seqlens[1]: 6: 2 new keys do not fit in the cache's capacity, 7; nearest legal: 5");
  Ints fits{4, 5};
  call.options.cache_seqlens = fits;
  const Call made = call.make();
  EXPECT_EQ(sequence(made.problem, made.buffers, 1).keys, 7);
  EXPECT_EQ(sequence(made.problem, made.buffers, 1).new_keys, 2);
}

TEST(Cache, new_keys) {
  TestCall call = contiguous();
  Ints filled{4, 4}, rows{2, 0}, bounds{0, 1, 4};
  call.options.cache_batch_idx = rows;
  call.options.k_new = call.tensor({2, 2, 2, 8});
  EXPECT_EQ(call.refusal(), "v_new: not given: k_new needs it");
  call.options.v_new = call.tensor({2, 2, 2, 6});
  EXPECT_EQ(call.refusal(), "cache_seqlens: not given: k_new needs it to know where to append");
  call.options.cache_seqlens = filled;
  call.options.k_new = call.tensor({2, 2, 1, 8});
  EXPECT_EQ(call.refusal(),
            "k_new: shape (2, 2, 1, 8): must be (b, s_new, hk, d) = (2, 2, 2, 8); nearest legal: (2, 2, 2, 8)");
  call.options.cu_seqlens_k_new = bounds;
  EXPECT_EQ(call.refusal(), "k_new: shape (2, 2, 1, 8): must have rank 3 (total, hk, d) with cu_seqlens_k_new");
  call.options.k_new = call.tensor({5, 2, 8});
  call.options.v_new = call.tensor({5, 2, 6});
  const Call made = call.make();
  EXPECT_EQ(sequence(made.problem, made.buffers, 0).keys, 5);
  EXPECT_EQ(sequence(made.problem, made.buffers, 1).keys, 7);
}

TEST(Cache, pages) {
  TestCall call = TestCall::paged();
  Ints table({0, 5, -9, 3, 99, 99}, {2, 3}), filled{7, 4};
  call.options.block_table = table;
  EXPECT_EQ(call.refusal(), "cache_seqlens: not given: block_table needs it");
  call.options.cache_seqlens = filled;
  EXPECT_EQ(call.refusal(), "");  // entries of pages that hold no key are not read
  Ints longer{9, 4};
  call.options.cache_seqlens = longer;
  EXPECT_EQ(
      call.refusal(),
      "block_table[0, 2]: -9: must be in [0, 5]: a key that is seen or appended lies in this page; nearest legal: 0");
  call.options.window.left = 4;
  call.options.causal = Causal::bottom_right;
  Ints front({77, 5, 1, 3, 99, 99}, {2, 3});
  call.options.block_table = front;
  EXPECT_EQ(call.refusal(), "");  // keys 4..8 alone are seen: page 0 is not read
  call.options.window.left = 5;
  EXPECT_EQ(
      call.refusal(),
      "block_table[0, 0]: 77: must be in [0, 5]: a key that is seen or appended lies in this page; nearest legal: 5");
}

TEST(Cache, a_pool_without_pages_has_no_slots) {
  TestCall call = TestCall::paged();
  Ints table({0, 0, 0, 0, 0, 0}, {2, 3}), none{0, 0}, some{0, 1};
  call.in.k.shape = {0, 4, 2, 8};
  call.in.v.shape = {0, 4, 2, 6};
  call.options.block_table = table;
  call.options.cache_seqlens = none;
  EXPECT_EQ(call.make().problem.capacity, 0);
  call.options.cache_seqlens = some;
  EXPECT_EQ(call.refusal(), "cache_seqlens[1]: 1: must be in [0, 0], the cache's capacity; nearest legal: 0");
}

TEST(Cache, H15_length_comes_from_cache_seqlens) {
  TestCall call = TestCall::paged();
  Ints table({0, 1, 2, 3, 4, 5}, {2, 3}), filled{8, 4};
  call.options.block_table = table;
  call.options.cache_seqlens = filled;
  const Call made = call.make();
  EXPECT_EQ(sequence(made.problem, made.buffers, 0).keys, 8);
  EXPECT_EQ(made.problem.text(), "forward fp32 cpu b=2 h=4 hk=2 sq=1 sk=8 d=8 dv=6 k=pages4");
}

TEST(Cache, lengths_of_other_forms_are_refused) {
  TestCall call = contiguous();
  Ints filled{4, 4}, rows{2, 0}, used{1, 1};
  call.options.cache_seqlens = filled;
  call.options.cache_batch_idx = rows;
  call.options.seqused_k = used;
  EXPECT_EQ(call.refusal(), "seqused_k: given: a cache's lengths are cache_seqlens");
}

TEST(Cache, H20_rotary_tables) {
  TestCall call = contiguous();
  Ints filled{4, 4}, rows{2, 0};
  call.options.cache_seqlens = filled;
  call.options.cache_batch_idx = rows;
  call.options.rotary_cos = call.tensor({16, 8});
  EXPECT_EQ(call.refusal(), "rotary_sin: not given: rotary_cos needs it");
  call.options.rotary_sin = call.tensor({16, 8});
  EXPECT_EQ(call.refusal(),
            "rotary_cos: shape (16, 8): has one column for each rotated pair: from 1 to d / 2 = 4; nearest legal: 4");
  call.options.rotary_cos = call.options.rotary_sin = call.tensor({8, 4});
  EXPECT_EQ(
      call.refusal(),
      "rotary_cos: shape (8, 4): sequence 0 rotates position 8: needs that many rows and one more; nearest legal: 9");
  call.options.rotary_cos = call.options.rotary_sin = call.tensor({9, 4});
  EXPECT_EQ(call.refusal(), "");
  Ints short_base{2, 0};
  call.options.rotary_base = short_base;  // without new keys the queries alone are rotated
  call.options.rotary_cos = call.options.rotary_sin = call.tensor({7, 4});
  EXPECT_EQ(call.refusal(), "");
  call.options.rotary_cos = call.options.rotary_sin = call.tensor({0, std::int64_t{1} << 62});
  EXPECT_NE(call.refusal().find("from 1 to d / 2 = 4"), std::string::npos);
  call.options.rotary_cos = call.options.rotary_sin = call.tensor({9, 4});
  Ints base{0, -1};
  call.options.rotary_base = base;
  EXPECT_EQ(call.refusal(), "rotary_base[1]: -1: must be >= 0; nearest legal: 0");
}

}  // namespace
}  // namespace narrows::test
