#include "core/error.hpp"
#include "core/problem.hpp"

namespace narrows {
namespace {

std::string side(i64 value) { return value >= kUnlimited ? "-1" : to_text(value); }

std::string_view name(KeyForm form) {
  switch (form) {
    case KeyForm::dense: return "dense";
    case KeyForm::varlen: return "varlen";
    case KeyForm::cache: return "cache";
    case KeyForm::pages: return "pages";
  }
  return "unknown";
}

std::string rules_text(const Problem& problem) {
  const Rules& rules = problem.rules;
  std::string joined;
  if (rules.causal != Causal::none) joined += text(" causal=", rules.causal);
  if (rules.own_shift) joined += " shift";
  const i64 right = rules.causal != Causal::none ? kUnlimited : rules.mask.right;
  if (rules.mask.left < kUnlimited || right < kUnlimited)
    joined += text(" window=(", side(rules.mask.left), ", ", side(right), ")");
  if (rules.mask.chunk) joined += text(" chunk=", rules.mask.chunk);
  if (rules.key_begin) joined += " key_begin";
  if (rules.key_end) joined += " key_end";
  if (rules.softcap > 0) joined += text(" softcap=", rules.softcap);
  if (problem.alibi_slopes.given) joined += " alibi_slopes";
  if (problem.bias.given) joined += " bias";
  if (problem.mask.given) joined += " mask";
  if (problem.sinks.given) joined += " sinks";
  if (rules.dropout > 0) joined += text(" dropout=", rules.dropout);
  if (problem.rotary_pairs) joined += text(" rotary=", 2 * problem.rotary_pairs);
  if (problem.appends) joined += " append";
  return joined;
}

}  // namespace

std::string Problem::text() const {
  const std::string_view equals = lengths_on_device ? "<=" : "=";
  std::string line = narrows::text(operation == Operation::forward ? "forward " : "backward ", dtype, " ", device,
                                   " b=", batch, " h=", heads, " hk=", kv_heads, " sq", equals, max_queries, " sk",
                                   equals, max_keys, " d=", head_dim);
  if (value_dim != head_dim) line += narrows::text(" dv=", value_dim);
  if (query_form == QueryForm::varlen) line += " q=varlen";
  if (key_form != KeyForm::dense) line += narrows::text(" k=", name(key_form));
  if (key_form == KeyForm::pages) line += narrows::text(page_size);
  return line + rules_text(*this);
}

}  // namespace narrows
