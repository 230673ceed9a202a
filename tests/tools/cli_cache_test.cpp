// narrows run on KV caches and with dropout.
#include <cmath>
#include <limits>

#include <gmock/gmock.h>

#include "cpu/reference.hpp"
#include "tests/tools/cli_support.hpp"

namespace narrows::cli {
namespace {

using testing::ElementsAre;
using testing::FloatNear;
using testing::HasSubstr;
using testing::IsNan;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

/// One query that scores every key 0, a cache of four slots of which two are filled.
Fixture cache() {
  Fixture fixture;
  fixture.add("q", {1, 1, 1, 1}, {0}).add("k", {1, 4, 1, 1}, {9, -9, kNaN, kNaN});
  fixture.add("v", {1, 4, 1, 1}, {1, 2, kNaN, kNaN});
  return fixture;
}

TEST(CliCache, appends_to_a_copy_and_writes_it) {
  const TemporaryDirectory directory;
  Fixture fixture = cache();
  fixture.add_int64("cache_seqlens", {1}, {2}).add("k_new", {1, 1, 1, 1}, {5}).add("v_new", {1, 1, 1, 1}, {6});
  const std::string in = fixture.save(directory / "in.safetensors"), out = (directory / "out.safetensors").string();
  const Outcome outcome = narrows({"run", in, "-o", out, "--check", "--repeat", "3"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  EXPECT_THAT(outcome.out, HasSubstr("k=cache append\n"));
  EXPECT_THAT(values_of(out, "o"), ElementsAre(FloatNear(3, 2e-6F)));
  EXPECT_THAT(values_of(out, "lse"), ElementsAre(FloatNear(std::log(3.0F), 2e-6F)));
  EXPECT_THAT(values_of(out, "k"), ElementsAre(9, -9, 5, IsNan()));
  EXPECT_THAT(values_of(out, "v"), ElementsAre(1, 2, 6, IsNan()));
  EXPECT_THAT(values_of(in, "v"), ElementsAre(1, 2, IsNan(), IsNan()));
}

TEST(CliCache, lengths_may_be_options_and_without_new_keys_no_cache_is_written) {
  const TemporaryDirectory directory;
  const std::string in = cache().save(directory / "in.npz"), out = (directory / "out.npz").string();
  const Outcome outcome = narrows({"run", in, "--cache-seqlens", "2", "-o", out, "--check"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(values_of(out, "o"), ElementsAre(1.5));
  EXPECT_EQ(files::read_tensor_file(out).arrays.size(), 2U);
  EXPECT_EQ(narrows({"run", in, "--cache_seqlens", "2", "--leftpad", "1", "-o", out}).code, 0);
  EXPECT_THAT(values_of(out, "o"), ElementsAre(2));
}

TEST(CliCache, pages_and_rows_of_the_cache_are_found) {
  const TemporaryDirectory directory;
  Fixture pages;
  pages.add("q", {1, 1, 1, 1}, {0}).add("k", {3, 2, 1, 1}, {1, kNaN, kNaN, kNaN, kNaN, 1});
  pages.add("v", {3, 2, 1, 1}, {30, kNaN, kNaN, kNaN, 10, 20});
  pages.add_int64("block_table", {1, 2}, {2, 0}).add_int64("cache_seqlens", {1}, {3}).add_int64("leftpad", {1}, {1});
  const std::string out = (directory / "out.npz").string();
  const Outcome paged = narrows({"run", pages.save(directory / "pages.npz"), "-o", out, "--check"});
  EXPECT_EQ(paged.code, 0) << paged.err;
  EXPECT_THAT(paged.out, HasSubstr("k=pages2"));
  EXPECT_THAT(values_of(out, "o"), ElementsAre(25));

  Fixture rows;
  rows.add("q", {1, 1, 1, 1}, {0}).add("k", {2, 1, 1, 1}, {kNaN, 1}).add("v", {2, 1, 1, 1}, {kNaN, 7});
  const Outcome indexed = narrows({"run", rows.save(directory / "rows.npz"), "--cache-seqlens", "1",
                                   "--cache-batch-idx", "1", "-o", out, "--check"});
  EXPECT_EQ(indexed.code, 0) << indexed.err;
  EXPECT_THAT(values_of(out, "o"), ElementsAre(7));
}

TEST(CliCache, varlen_new_keys_and_heads_first) {
  const TemporaryDirectory directory;
  Fixture fixture;  // two sequences, two heads, caches (b, hk, capacity, d)
  fixture.add("q", {2, 2, 1, 1}, {0, 0, 0, 0}).add("k", {2, 2, 2, 1}, {0, 0, 0, 0, 0, 0, 0, 0});
  fixture.add("v", {2, 2, 2, 1}, {1, kNaN, 2, kNaN, kNaN, kNaN, kNaN, kNaN});
  fixture.add("k_new", {2, 2, 1}, {1, 2, 3, 4}).add("v_new", {2, 2, 1}, {5, 6, 7, 8});  // (h, total_new, d)
  fixture.add_int64("cu_seqlens_k_new", {3}, {0, 1, 2}).add_int64("cache_seqlens", {2}, {1, 0});
  const std::string in = fixture.save(directory / "in.npz"), out = (directory / "out.npz").string();
  const Outcome outcome = narrows({"run", in, "--layout", "bhsd", "-o", out, "--check"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(values_of(out, "v"), ElementsAre(1, 5, 2, 7, 6, IsNan(), 8, IsNan()));
  EXPECT_THAT(values_of(out, "k"), ElementsAre(0, 1, 0, 3, 2, 0, 4, 0));
  EXPECT_THAT(values_of(out, "o"), ElementsAre(3, 4.5, 6, 8));
}

/// A quarter turn at position 1.
Fixture rotated() {
  Fixture fixture;
  fixture.add("q", {1, 1, 1, 2}, {std::log(3.0F), 0}).add("k", {1, 2, 1, 2}, {kNaN, kNaN, kNaN, kNaN});
  fixture.add("v", {1, 2, 1, 2}, {kNaN, kNaN, kNaN, kNaN});
  fixture.add("k_new", {1, 2, 1, 2}, {1, 0, 1, 0}).add("v_new", {1, 2, 1, 2}, {4, 0, 0, 4});
  fixture.add("rotary_cos", {2, 1}, {1, 0}).add("rotary_sin", {2, 1}, {0, 1});
  return fixture;
}

TEST(CliCache, rotary_tables_turn_queries_and_new_keys) {
  const TemporaryDirectory directory;
  const std::string in = rotated().save(directory / "in.npz"), out = (directory / "out.npz").string();
  const Words words{"run", in, "--cache-seqlens", "0", "--scale", "1", "-o", out, "--check"};
  const Outcome outcome = narrows(words);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("rotary=2 append"));
  EXPECT_THAT(values_of(out, "k"), ElementsAre(1, 0, 0, 1));
  EXPECT_THAT(values_of(out, "o"), ElementsAre(FloatNear(3, 2e-6F), FloatNear(1, 2e-6F)));  // logits ln 3 and 0
  Words moved = words;
  moved.insert(moved.end(), {"--rotary-base", "1", "--rotary-interleaved"});
  EXPECT_EQ(narrows(moved).code, 0);
  EXPECT_THAT(values_of(out, "o"), ElementsAre(FloatNear(1, 2e-6F), FloatNear(3, 2e-6F)));
}

TEST(CliCache, new_keys_are_rounded_with_the_cache) {
  const TemporaryDirectory directory;
  const std::string in = rotated().save(directory / "in.npz"), out = (directory / "out.safetensors").string();
  const Outcome outcome = narrows({"run", in, "--cache-seqlens", "0", "--dtype", "bf16", "-o", out, "--check"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_EQ(files::read_tensor_file(out).find("k")->dtype, DType::bf16);
}

TEST(CliCache, what_does_not_fit_is_refused) {
  const TemporaryDirectory directory;
  Fixture full = cache();
  full.add_int64("cache_seqlens", {1}, {4}).add("k_new", {1, 1, 1, 1}, {5}).add("v_new", {1, 1, 1, 1}, {6});
  const std::string in = full.save(directory / "in.npz"), out = (directory / "out.npz").string();
  const Outcome outcome = narrows({"run", in, "-o", out});
  EXPECT_EQ(outcome.code, 2);
  EXPECT_THAT(outcome.err, HasSubstr("cache_seqlens[0]: 4"));
  EXPECT_FALSE(std::filesystem::exists(out));
  EXPECT_THAT(narrows({"run", in, "--cache-seqlens", "1"}).err, HasSubstr("cache_seqlens: given twice"));
}

TEST(CliDropout, drops_what_seed_offset_and_origin_say) {
  const TemporaryDirectory directory;
  Fixture fixture;
  std::vector<float> v(64);
  for (std::size_t j = 0; j < v.size(); ++j) v[j] = static_cast<float>(j);
  const std::vector<float> zeros(64, 0);
  fixture.add("q", {1, 4, 1, 1}, {0, 0, 0, 0}).add("k", {1, 64, 1, 1}, zeros).add("v", {1, 64, 1, 1}, v);
  const std::string in = fixture.save(directory / "in.npz"), out = (directory / "out.npz").string();
  std::vector<float> q(4, 0), keys = zeros;
  Options options;
  options.dropout = 0.25;
  options.seed = 7;
  options.offset = 3;
  options.origin = {0, 0, 5, 6, 1};
  const reference::ForwardResult exact = reference::exact_forward(
      {view(q.data(), {1, 4, 1, 1}), view(keys.data(), {1, 64, 1, 1}), view(v.data(), {1, 64, 1, 1})}, options);
  std::vector<testing::Matcher<float>> expected;
  for (const double o : exact.o.value) expected.push_back(FloatNear(static_cast<float>(o), 1e-4F));
  const Words words{"run", in, "--dropout", "0.25", "--seed", "7", "-o", out, "--check"};
  Words all = words;
  all.insert(all.end(), {"--offset", "3", "--origin", "0,0,5,6,1"});
  EXPECT_EQ(narrows(all).code, 0);
  const std::vector<float> o = values_of(out, "o");
  EXPECT_THAT(o, testing::ElementsAreArray(expected));
  EXPECT_THAT(values_of(out, "lse"), testing::Each(FloatNear(std::log(64.0F), 2e-6F)));
  EXPECT_EQ(narrows(words).code, 0);
  EXPECT_NE(values_of(out, "o"), o);
  all.push_back("--backward");
  EXPECT_EQ(narrows(all).code, 0);
}

}  // namespace
}  // namespace narrows::cli
