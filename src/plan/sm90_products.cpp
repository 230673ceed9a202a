#include "plan/sm90_products.hpp"

#include "core/error.hpp"

namespace narrows::sm90 {
namespace {

/// prefix + number + suffix for each number of [first, first + count), with commas.
std::string listed(std::string_view prefix, i32 first, i32 count, std::string_view suffix) {
  std::string list;
  for (i32 i = first; i < first + count; ++i) list += text(i == first ? "" : ", ", prefix, i, suffix);
  return list;
}

struct Product {
  std::string_view name;
  i32 columns;                  // of D
  bool registers;               // that A comes from; otherwise shared memory
  bool down_columns;            // of the tile B in shared memory the sum runs, not along its rows
  bool a_down_columns = false;  // the same of A
};

std::string text_of(const Product& product, std::string_view element) {
  const i32 sums = product.columns / 2, operands = product.registers ? 4 : 1, b = sums + operands;
  std::string outputs;
  for (i32 i = 0; i < sums; ++i) outputs += text(i ? ", " : "", "\"+f\"(d[0][", i / 4, "][", i % 4, "])");
  const std::string a = product.registers ? text("{", listed("%", sums, 4, ""), "}") : text("%", sums);
  const std::string_view majors = product.registers ? "" : product.a_down_columns ? "1, " : "0, ";
  return text(
      "inline void ", product.name, "(float (&d)[1][", product.columns / 8, "][4], ",
      product.registers ? "const u32 (&a)[4]" : "u64 a", ", u64 b, int adds) {\n  asm volatile(\n",
      "      \"{.reg .pred p; setp.ne.b32 p, %", b + 1, ", 0;\\n\"\n", "      \"wgmma.mma_async.sync.aligned.m64n",
      product.columns, "k16.f32.", element, ".", element, " {", listed("%", 0, sums, ""), "}, ", a, ", %", b,
      ", p, 1, 1, ", majors, product.down_columns ? 1 : 0, ";}\"\n", "      : ", outputs,
      "\n      : ", product.registers ? listed("\"r\"(a[", 0, 4, "])") : "\"l\"(a)", ", \"l\"(b), \"r\"(adds));\n}\n");
}

}  // namespace

std::string products_text(Element element, i32 key_block, i32 value_width) {
  const std::string_view name = element == Element::fp16 ? "f16" : "bf16";
  return text_of({"multiply_scores", key_block, false, false}, name) +
         text_of({"multiply_scores", key_block, true, false}, name) +
         text_of({"multiply_output", value_width, true, true}, name);
}

std::string backward_products_text(Element element, i32 query_block, i32 head_width, i32 value_width) {
  constexpr i32 kPartColumns = 64;
  const std::string_view name = element == Element::fp16 ? "f16" : "bf16";
  std::string products = text_of({"multiply_scores", query_block, false, false}, name) +
                         text_of({"multiply_sums", head_width, true, true}, name);
  if (value_width != head_width) products += text_of({"multiply_sums", value_width, true, true}, name);
  return products + text_of({"multiply_gradients", kPartColumns, false, true, true}, name);
}

std::string backward_wide_products_text(Element element, i32 query_block) {
  constexpr i32 kPartColumns = 64;
  const std::string_view name = element == Element::fp16 ? "f16" : "bf16";
  return text_of({"multiply_scores", query_block, false, false}, name) +
         text_of({"multiply_sums", kPartColumns, false, true}, name) +
         text_of({"multiply_sums", 2 * kPartColumns, false, true}, name) +
         text_of({"multiply_gradients", kPartColumns, false, true, true}, name);
}

}  // namespace narrows::sm90
